"""Features of two or three dimensions, of networks, of their history, and as records."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dcnet.data import Dataset
from dcnet.files import read_json, write_atomically
from dcnet.report.feature_checks import check_features
from dcnet.report.spread import Spread, spread_of
from dcnet.training.snapshots import History

Record = dict[str, Any]

# Test images that are drawn and kept, each class in proportion: more would hide each other.
SHOWN = 1000
KIND = "features"


@dataclass(frozen=True)
class Features:
    """What is drawn of a network.

    Attributes:
        title: what it is.
        points, labels: features [N, 2 or 3] of images, and their labels [N].
        classes: their names.
        directions: of the classes [C, 2 or 3], where the network has them.
        spread: of all images, of which the points may be some; None for that of the points.
        accuracy: of all images, in %.
    """

    title: str
    points: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    directions: Tensor | None = None
    spread: Spread | None = None
    accuracy: float | None = None

    def __post_init__(self) -> None:
        check_count(self.title, self.points.shape[-1])
        if self.spread is None:
            object.__setattr__(self, "spread", spread_of(self.points, self.labels))


def check_count(title: str, count: int, has_margin: bool = False) -> None:
    if count not in (2, 3):
        # Only a head with a margin can be told how many features there are.
        options = "--features 2" if has_margin else "--margin softmax --features 2"
        raise ValueError(f"{title} has {count} features, of which 2 or 3 can be drawn: train with {options}")


def title_of(config: Mapping[str, Any]) -> str:
    """A network by its operator and its loss."""
    annealed = f"annealing {config['annealing']}" if config.get("annealing") else None
    hostile = f"against {config['adversary']}" if config.get("adversary") else None
    return ", ".join(str(part) for part in (config["operator"], config.get("margin"), annealed, hostile) if part)


@torch.no_grad()
def features_of(model: nn.Module, record: Record, dataset: Dataset) -> Features:
    """The features of test images; spread and accuracy are of all of them."""
    title, test, network = title_of(record["config"]), dataset.test, getattr(model, "network", model)
    check_count(title, getattr(network, "num_features", 0), bool(record["config"].get("margin")))
    head: Any = getattr(network, "head", None) or network.classifier
    logits = getattr(head, "logits", head)
    points = _points(model, test.images)
    drawn = test.first(min(SHOWN, len(test)), dataset.num_classes)
    return Features(
        title=title,
        points=_points(model, drawn.images),
        labels=drawn.labels,
        classes=dataset.classes,
        directions=head.weight.detach(),
        spread=spread_of(points, test.labels),
        accuracy=100 * (logits(points).argmax(1) == test.labels).double().mean().item(),
    )


def _points(model: Any, images: Tensor) -> Tensor:
    return torch.cat([model.features(part.float() / 255) for part in images.split(500)])


def frames_of(history: History, record: Record) -> list[Features]:
    """The features at each evaluation of a run, with the epoch in the title."""
    curves = record["curves"]
    when = dict(zip(curves["step"], zip(curves["epoch"], curves["test_accuracy"], strict=True), strict=True))
    title, classes = title_of(record["config"]), tuple(record["data"]["classes"])
    frames = []
    for step, points, directions in zip(history.steps.tolist(), history.points, history.directions, strict=True):
        epoch, accuracy = when[step]
        frames.append(
            Features(f"{title}, epoch {epoch:.1f}", points, history.labels, classes, directions, accuracy=accuracy)
        )
    return frames


def record_of(features: Features, record: Record) -> Record:
    """All that is drawn, and the run that it is of, as plain values with four digits."""
    assert features.spread is not None
    told = ("name", "hash", "command", "commit", "config", "environment")
    return {
        "kind": KIND,
        **{name: record.get(name) for name in told},
        "title": features.title,
        "classes": list(features.classes),
        "test_images": record["data"].get("test_images"),
        "accuracy": features.accuracy,
        "spread": dataclasses.asdict(features.spread),
        "labels": features.labels.tolist(),
        "points": _rounded(features.points),
        "directions": None if features.directions is None else _rounded(features.directions),
    }


def _rounded(rows: Tensor) -> list[list[float]]:
    return [[float(f"{value:.4g}") for value in row] for row in rows.tolist()]


def write_features(path: Path, record: Record) -> None:
    """On one line: indented, a thousand points would be thousands of lines."""
    write_atomically(path, (json.dumps(record, allow_nan=False) + "\n").encode())


def read_features(path: Path) -> Features:
    """What `write_features` wrote."""
    try:
        return features_in(read_json(path, any_number=True))
    except KeyError as error:
        raise ValueError(f"{str(path)!r} is not a record of features: it lacks {error}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(path)!r} is not a record of features: {error}") from None


def features_in(record: Record) -> Features:
    """The features that a record holds; if it is damaged that is a ValueError, and if it lacks something a KeyError."""
    if not isinstance(record, dict) or record.get("kind") != KIND:
        raise ValueError("it is of another kind")
    check_features(record)
    directions = record["directions"]
    return Features(
        title=record["title"],
        points=torch.tensor(record["points"], dtype=torch.float32),
        labels=torch.tensor(record["labels"]),
        classes=tuple(record["classes"]),
        directions=None if directions is None else torch.tensor(directions, dtype=torch.float32),
        spread=Spread(**record["spread"]),
        accuracy=record["accuracy"],
    )
