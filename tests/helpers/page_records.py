"""Records for the report page: those of the repository, and made-up ones."""

import functools
import json
from pathlib import Path
from typing import Any

from dcnet.report.page import Sources, page
from helpers.page_tree import Node, read

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "results"


@functools.cache
def real_page() -> str:
    return page(Sources((RESULTS,)))


@functools.cache
def real_tree() -> Node:
    return read(real_page())


def drawn(folder: Path) -> Node:
    return read(page(Sources((folder,))))


def a_run(**changes: Any) -> dict[str, Any]:
    """The record of a run of the repository, with changes."""
    file = next(iter(sorted((RESULTS / "digits").glob("*tanh-cos-seed0*.json"))))
    return json.loads(file.read_text()) | changes


def values_of(figure: Any) -> dict[str, Any]:
    """The values that the script of a chart reads."""
    return json.loads("".join(figure.one("script", class_="values").children))


def put(folder: Path, name: str, record: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(record))


def features(dimensions: int = 2) -> dict[str, Any]:
    points = [[1.0, 0.5, 0.2][:dimensions], [-1.0, 0.25, 0.1][:dimensions], [-0.9, 0.3, 0.0][:dimensions]]
    return {
        "kind": "features",
        "name": "mnist-tiny",
        "hash": "0123abcd",
        "command": "dcnet train --recipe features --margin softmax",
        "commit": "f" * 40,
        "environment": {"torch": "2.13.0", "cpu": "one", "date": "2026-11-15T00:00:00+00:00"},
        "title": "conv, softmax",
        "classes": ["zero", "<one>"],
        "accuracy": 98.7654,
        "spread": {"within": 4.321, "between": 90.0, "nearest": 45.67, "fisher": 0.12345},
        "labels": [0, 1, 1],
        "points": points,
        "directions": list(points[:2]),
    }
