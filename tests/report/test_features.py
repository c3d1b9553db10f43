"""Spread of features, and their records."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cli_runs import complaint
from helpers.page_records import features, put

from dcnet.cli.app import main
from dcnet.report.features import features_in, read_features, spread_of, target_angle
from dcnet.report.page import Sources, page
from dcnet.training import Execution, Run, Trainer, recipe


def direction(points):
    total = [sum(values) for values in zip(*points, strict=True)]
    size = math.sqrt(sum(value * value for value in total))
    return [value / size for value in total]


def cosine(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def test_spread_matches_plain_loops():
    torch.manual_seed(0)
    points, labels = torch.randn(30, 3) + 2 * torch.eye(3).repeat(10, 1), torch.arange(30) % 3
    unit = [direction([row]) for row in points.tolist()]
    means = {c: direction([u for u, label in zip(unit, labels.tolist(), strict=True) if label == c]) for c in range(3)}
    own = [cosine(u, means[label]) for u, label in zip(unit, labels.tolist(), strict=True)]
    angles = {a: [math.degrees(math.acos(cosine(means[a], means[b]))) for b in range(3) if b != a] for a in range(3)}
    middle = direction(unit)
    fisher = sum(1 - c for c in own) / sum(10 * (1 - cosine(means[c], middle)) for c in range(3))
    found = spread_of(points, labels)
    assert found.within == pytest.approx(sum(math.degrees(math.acos(c)) for c in own) / 30, rel=1e-5)
    assert found.between == pytest.approx(sum(sum(row) for row in angles.values()) / 6, rel=1e-5)
    assert found.nearest == pytest.approx(sum(min(row) for row in angles.values()) / 3, rel=1e-5)
    assert found.nearest < found.between
    assert found.fisher == pytest.approx(fisher, rel=1e-4)


def test_spread_accepts_missing_classes():
    points = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]])
    found = spread_of(points, torch.tensor([2, 2, 7]))
    assert (found.within, found.between, found.nearest) == pytest.approx((0, 90, 90), abs=1e-4)


def test_one_class_has_no_angle_between_classes():
    found = spread_of(torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([3, 3]))
    assert found.within == pytest.approx(22.5)
    assert math.isnan(found.between)


def test_target_angle_matches_plain_loops():
    points, directions = torch.tensor([[3.0, 0.0], [0.0, 2.0]]), torch.tensor([[0.0, 5.0], [1.0, 1.0]])
    assert target_angle(points, torch.tensor([1, 0]), directions) == pytest.approx((45 + 0) / 2)


def test_spread_ignores_norms():
    torch.manual_seed(0)
    points, labels = torch.randn(20, 2), torch.arange(20) % 2
    longer = points * torch.rand(20, 1).add(0.5)
    assert spread_of(longer, labels).fisher == pytest.approx(spread_of(points, labels).fisher, rel=1e-5)


Capture = pytest.CaptureFixture[str]
SPREAD = features()["spread"]
DAMAGED = {
    "a label that is no class": ({"labels": [0, 1, 2]}, "labels must be from 0 to 1 for 2 classes, not 2"),
    "a label below all": ({"labels": [0, 1, -1]}, "labels must be from 0 to 1 for 2 classes, not -1"),
    "a label in words": ({"labels": [0, 1, "1"]}, "labels must be from 0 to 1 for 2 classes, not '1'"),
    "too few labels": ({"labels": [0, 1]}, "it has 2 labels for 3 points: expected one label per point"),
    "no labels": ({"labels": None}, "it has the labels None for 3 points"),
    "a direction too many": (
        {"directions": [[1, 0]] * 3},
        "it has 3 directions and 2 classes: expected one direction per class",
    ),
    "directions of space": ({"directions": [[1, 0, 0]] * 2}, "points have 2 numbers each and its directions 3"),
    "no spread": ({"spread": {**SPREAD, "within": None}}, "within of its spread must be a finite number, not None"),
    "half a spread": ({"spread": {"within": 1.0}}, "spread must have exactly within, between, nearest, fisher, not {"),
    "accuracy in words": ({"accuracy": "98.7"}, "its accuracy must be a finite number or null, not '98.7'"),
    "not a number": ({"points": [[1, 0], [float("nan"), 0], [0, 1]]}, "finite numbers, but number 1 is [nan, 0]"),
    "beyond all numbers": ({"points": [[1, 0], [10**400, 0], [0, 1]]}, "points must be finite numbers, but number 1"),
    "a point of space": ({"points": [[1, 0], [1, 0, 0], [0, 1]]}, "2 numbers, or all 3, but number 1 has 3"),
    "points of four": ({"points": [[1, 0, 0, 0]] * 3}, "2 numbers, or all 3, but number 0 has 4"),
    "no points": ({"points": []}, "its points must be a list of lists of numbers, not []"),
    "a number for points": ({"points": 7}, "its points must be a list of lists of numbers, not 7"),
    "classes that are no names": ({"classes": 2}, "its classes must be a list of names, not 2"),
    "no title": ({"title": None}, "its title must be text, not None"),
}


@pytest.mark.parametrize(("change", "says"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_record_gives_a_one_line_error(tmp_path: Path, capsys: Capture, change: dict[str, Any], says: str):
    put(tmp_path, "bad", features() | change)
    message = complaint(capsys, "plot", "features", tmp_path / "bad.json", "--out", tmp_path / "drawn.png")
    assert message.startswith(f"dcnet: {str(tmp_path / 'bad.json')!r} is not a record of features: ")
    assert says in message
    assert not (tmp_path / "drawn.png").exists()
    message = complaint(capsys, "report", "--records", tmp_path, "--out", tmp_path / "page.html")
    assert message.startswith("dcnet: the features of the record 'bad' cannot be drawn: ")
    assert says in message


def test_missing_keys_of_a_record_are_reported(tmp_path: Path):
    record = features()
    del record["points"]
    put(tmp_path, "half", record)
    with pytest.raises(ValueError, match="is not a record of features: it lacks 'points'"):
        read_features(tmp_path / "half.json")


@pytest.mark.parametrize("change", [{"accuracy": None}, {"directions": None}, {"points": [[1, 0], [0, 1], [1, 1]]}])
def test_optional_keys_of_a_record_may_be_missing(tmp_path: Path, change: dict[str, Any]):
    found = features_in(features() | change)
    assert found.points.is_floating_point()
    put(tmp_path, "some", features() | change)
    assert "features-some" in page(Sources((tmp_path,)))


def tiny_run(folder: Path, **changes: Any) -> Path:
    config = recipe("digits", operator="conv", steps=1, train_images=20, batch_size=20, width=0.1, **changes)
    Trainer(config, Run(folder), Execution(device="cpu")).run()
    return folder


def test_runs_with_the_same_name_are_not_written_to_one_record(tmp_path: Path, capsys: Capture):
    first = tiny_run(tmp_path / "a" / "run", margin="softmax", features=2)
    second = shutil.copytree(first, tmp_path / "b" / "run")
    out, records = ("--out", tmp_path / "drawn.png"), tmp_path / "records"
    message = complaint(capsys, "plot", "features", first, second, "--records", records, *out)
    assert f"{str(first)!r} and {str(second)!r} would both be written to {str(records / 'run.json')!r}" in message
    assert not records.exists()
    # One run given by two names is one record.
    assert main(["plot", "features", str(first), f"{first}/../run", "--records", str(records), *map(str, out)]) == 0
    assert json.loads((records / "run.json").read_text())["kind"] == "features"


@pytest.mark.parametrize(
    ("changes", "advice"),
    [({}, "--margin softmax --features 2"), ({"margin": "softmax", "features": 8}, "--features 2")],
)
def test_advised_command_is_valid(tmp_path: Path, capsys: Capture, changes: dict[str, Any], advice: str):
    run = tiny_run(tmp_path / "run", **changes)
    assert f": train with {advice}\n" in complaint(capsys, "plot", "features", run)
