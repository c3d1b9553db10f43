"""The table and the plots of features match the records."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dcnet.report import feature_plots
from dcnet.report.features import Features, frames_of, record_of, write_features
from dcnet.training.evaluation import History
from dcnet.training.record import DataDescription, Record


def made(
    operator: str,
    margin: str,
    annealing: str | None = None,
    accuracy: float = 98.0,
    adversary: str | None = None,
) -> dict[str, Any]:
    torch.manual_seed(0)
    config = {"recipe": "features", "dataset": "mnist", "model": "cnn9-small", "width": 0.25, "features": 2}
    config |= {"steps": 1200, "batch_size": 128, "seed": 0}
    config |= {"operator": operator, "margin": margin, "annealing": annealing, "adversary": adversary}
    points = Features(f"{operator}, {margin}", torch.randn(20, 2), torch.arange(20) % 2, ("a", "b"), accuracy=accuracy)
    return record_of(points, Record(config=config, data=DataDescription(test_images=10_000)))


RECORDS = [
    made("conv", "softmax", adversary="fgsm"),
    made("tanh-cos", "softmax"),
    made("conv", "a-softmax", "auto"),
    made("conv", "a-softmax"),
    made("sphere-cos", "softmax"),
    made("conv", "softmax", accuracy=12.345),
]


def test_table_has_a_row_per_record_in_order():
    rows = [line.split(" | ") for line in feature_plots.features(RECORDS).splitlines() if line.startswith("| `")]
    assert [(row[0], row[1]) for row in rows] == [
        ("| `conv`", "`softmax`"),
        ("| `conv`", "`a-softmax`"),
        ("| `conv`", "`a-softmax`, annealing auto"),
        ("| `sphere-cos`", "`softmax`"),
        ("| `tanh-cos`", "`softmax`"),
        ("| `conv`", "`softmax`, against `fgsm`"),
    ]
    assert rows[0][2] in ("12.35", "12.34")
    assert rows[0][3] == "-"
    assert rows[0][4] == f"{RECORDS[5]['spread']['within']:.1f}"


def test_pictures_compare_losses_and_operators(tmp_path: Path):
    for i, record in enumerate(RECORDS):
        write_features(tmp_path / "features" / f"{i}.json", record)
    found = feature_plots.pictures(tmp_path)
    titles = {name: [axes.get_title().split(":")[0] for axes in figure.axes] for name, figure in found.items()}
    assert titles == {
        "features_losses.png": ["conv, softmax", "conv, a-softmax", "conv, a-softmax"],
        "features_operators.png": ["conv, softmax", "sphere-cos, softmax", "tanh-cos, softmax"],
        "features_adversarial.png": ["conv, softmax"],
    }


def test_pictures_are_empty_without_records(tmp_path: Path):
    assert feature_plots.pictures(tmp_path) == {}


def test_record_of_features_is_small(tmp_path: Path):
    many = Features("x", torch.randn(1000, 2) * 30, torch.arange(1000) % 10, tuple("0123456789"), torch.randn(10, 2))
    path = tmp_path / "x.json"
    write_features(path, record_of(many, Record()))
    assert path.stat().st_size < 30_000
    points = torch.tensor(json.loads(path.read_text())["points"])
    torch.testing.assert_close(points, many.points, rtol=5e-4, atol=0)


def test_frames_have_epoch_and_accuracy_in_the_title():
    history = History(torch.tensor([5, 9]), torch.arange(4) % 2, torch.randn(2, 4, 2), torch.randn(2, 2, 2))
    curves = {"step": [5, 9], "epoch": [0.5, 0.9], "test_accuracy": [60.0, 70.0]}
    config = {"operator": "conv", "margin": "softmax", "annealing": None}
    frames = frames_of(history, Record.from_json({"config": config, "curves": curves, "data": {"classes": ["a", "b"]}}))
    assert [(frame.title, frame.accuracy) for frame in frames] == [
        ("conv, softmax, epoch 0.5", 60.0),
        ("conv, softmax, epoch 0.9", 70.0),
    ]
    assert [frame.spread.within for frame in frames] == pytest.approx(
        [Features("x", points, history.labels, ("a", "b")).spread.within for points in history.points]
    )
