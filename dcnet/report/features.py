"""Two- or three-dimensional features of networks, their spread, and their records."""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcnet.checks import shortened
from dcnet.data import Dataset
from dcnet.files import read_json, write_atomically
from dcnet.losses.margins import mean_centers
from dcnet.training import Record as RunRecord
from dcnet.training.evaluation import History


@dataclass(frozen=True)
class Spread:
    """Mean angles in degrees, and the angular Fisher score.

    Attributes:
        within: mean angle between features and the mean direction of their class.
        between: mean angle between the mean directions of two classes; the same for all even arrangements on a circle.
        nearest: mean angle between the mean direction of a class and the nearest one of another class.
        fisher: the sum of 1 - cos between features and their class mean, divided by that between class means and the
            overall mean; smaller is better.
    """

    within: float
    between: float
    nearest: float
    fisher: float

    def __str__(self) -> str:
        within = f"within a class {self.within:.1f}°"
        return (
            f"{within}, between classes {self.between:.1f}°, to the nearest {self.nearest:.1f}°\n"
            f"angular Fisher score {self.fisher:.3f}"
        )


def spread_of(points: Tensor, labels: Tensor) -> Spread:
    """Computes the spread of features [N, D] with labels [N]; `between` and `nearest` are NaN for a single class."""
    unit = F.normalize(points.double(), dim=1)
    classes = labels.unique()
    means = torch.stack([F.normalize(unit[labels == c].mean(0), dim=0) for c in classes])
    cos = (unit * means[torch.searchsorted(classes, labels)]).sum(1).clamp(-1, 1)
    counts = torch.stack([(labels == c).sum() for c in classes]).double()
    apart = (counts * (1 - means @ F.normalize(unit.mean(0), dim=0))).sum()
    between, nearest = _between(means)
    return Spread(
        within=torch.rad2deg(torch.acos(cos)).mean().item(),
        between=between,
        nearest=nearest,
        fisher=((1 - cos).sum() / apart.clamp(min=1e-12)).item(),
    )


def target_angle(points: Tensor, labels: Tensor, directions: Tensor) -> float:
    """Returns the mean angle, in degrees, between features [N, D] and the directions [C, D] of their classes."""
    cos = F.cosine_similarity(points.double(), directions.double()[labels], dim=1).clamp(-1, 1)
    return torch.rad2deg(torch.acos(cos)).mean().item()


def _between(means: Tensor) -> tuple[float, float]:
    """Returns the mean angle between directions, and the mean angle to the nearest other direction."""
    count = len(means)
    if count < 2:
        return math.nan, math.nan
    angles = torch.rad2deg(torch.acos((means @ means.T).clamp(-1, 1)))
    others = angles[~torch.eye(count, dtype=torch.bool)].view(count, count - 1)
    return others.mean().item(), others.amin(1).mean().item()


Record = dict[str, Any]
# The largest float32.
LARGEST = 3.4e38


def check_features(record: Record) -> None:
    """Raises ValueError if a value of the record is invalid, and KeyError if one is missing."""
    _check_words(record["title"], record["classes"])
    points = _check_rows("points", record["points"])
    _check_labels(record["labels"], len(record["points"]), len(record["classes"]))
    if record["directions"] is not None:
        width = _check_rows("directions", record["directions"])
        if len(record["directions"]) != len(record["classes"]):
            found = f"{len(record['directions'])} directions and {len(record['classes'])} classes"
            raise ValueError(f"it has {found}: expected one direction per class")
        if width != points:
            raise ValueError(f"its points have {points} numbers each and its directions {width}: expected the same")
    _check_spread(record["spread"])
    if record["accuracy"] is not None and not is_finite(record["accuracy"]):
        raise ValueError(f"its accuracy must be a finite number or null, not {record['accuracy']!r}")


def is_finite(value: Any) -> bool:
    """Whether the value is a number that is finite in float32."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def _check_words(title: Any, classes: Any) -> None:
    if not isinstance(title, str):
        raise ValueError(f"its title must be text, not {title!r}")
    if not isinstance(classes, list) or not classes or not all(isinstance(name, str) for name in classes):
        raise ValueError(f"its classes must be a list of names, not {shortened(classes)}")


def _check_rows(what: str, rows: Any) -> int:
    """Checks the rows and returns their length, 2 or 3."""
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) for row in rows):
        raise ValueError(f"its {what} must be a list of lists of numbers, not {shortened(rows)}")
    width = len(rows[0])
    for at, row in enumerate(rows):
        if len(row) not in (2, 3) or len(row) != width:
            raise ValueError(f"its {what} must all have 2 numbers, or all 3, but number {at} has {len(row)}")
        if not all(is_finite(value) for value in row):
            raise ValueError(f"its {what} must be finite numbers, but number {at} is {shortened(row)}")
    return width


def _check_labels(labels: Any, points: int, classes: int) -> None:
    if not isinstance(labels, list) or len(labels) != points:
        count = f"{len(labels)} labels" if isinstance(labels, list) else f"the labels {shortened(labels)}"
        raise ValueError(f"it has {count} for {points} points: expected one label per point")
    for label in labels:
        if type(label) is not int or not 0 <= label < classes:
            raise ValueError(f"its labels must be from 0 to {classes - 1} for {classes} classes, not {label!r}")


def _check_spread(spread: Any) -> None:
    names = [field.name for field in dataclasses.fields(Spread)]
    if not isinstance(spread, dict) or set(spread) != set(names):
        raise ValueError(f"its spread must have exactly {', '.join(names)}, not {shortened(spread)}")
    for name, value in spread.items():
        if not is_finite(value):
            raise ValueError(f"{name} of its spread must be a finite number, not {value!r}")


# The size of the stratified subset of test images that is drawn and stored.
SHOWN = 1000
KIND = "features"


@dataclass(frozen=True)
class Features:
    """The features of a network.

    Attributes:
        title: describes the network.
        points: features [N, 2 or 3] of some images.
        labels: labels [N] of these images.
        classes: names of the classes.
        directions: class weights [C, 2 or 3], if the network has them.
        spread: spread of the features of all images; None to compute it from `points`.
        accuracy: accuracy on all images, in %.
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
        # --features needs a head with a margin.
        options = "--features 2" if has_margin else "--margin softmax --features 2"
        raise ValueError(f"only 2 or 3 features can be drawn, but {title} has {count}: train with {options}")


def title_of(config: Mapping[str, Any]) -> str:
    """Returns a title from operator, loss and adversary."""
    annealed = f"annealing {config['annealing']}" if config.get("annealing") else None
    adversary = f"against {config['adversary']}" if config.get("adversary") else None
    return ", ".join(str(part) for part in (config["operator"], config.get("margin"), annealed, adversary) if part)


@torch.no_grad()
def features_of(model: nn.Module, record: RunRecord, dataset: Dataset) -> Features:
    """Computes the features of some test images, and spread and accuracy of all of them."""
    title, test, network = title_of(record.config), dataset.test, getattr(model, "network", model)
    check_count(title, getattr(network, "num_features", 0), bool(record.config.get("margin")))
    head: Any = getattr(network, "head", None) or network.classifier
    logits = getattr(head, "logits", head)
    points = _points(model, test.images)
    drawn = test.subset(min(SHOWN, len(test)), dataset.num_classes)
    return Features(
        title=title,
        points=_points(model, drawn.images),
        labels=drawn.labels,
        classes=dataset.classes,
        directions=mean_centers(head.weight.detach(), dataset.num_classes),
        spread=spread_of(points, test.labels),
        accuracy=100 * (logits(points).argmax(1) == test.labels).double().mean().item(),
    )


def _points(model: Any, images: Tensor) -> Tensor:
    return torch.cat([model.features(part.float() / 255) for part in images.split(500)])


def frames_of(history: History, record: RunRecord) -> list[Features]:
    """Returns the features at each evaluation of a run, with the epoch in the title."""
    curves = record.curves
    when = dict(zip(curves.step, zip(curves.epoch, curves.test_accuracy, strict=True), strict=True))
    title, classes = title_of(record.config), tuple(record.data.classes)
    frames = []
    for step, points, directions in zip(history.steps.tolist(), history.points, history.directions, strict=True):
        epoch, accuracy = when[step]
        frames.append(
            Features(f"{title}, epoch {epoch:.1f}", points, history.labels, classes, directions, accuracy=accuracy)
        )
    return frames


def record_of(features: Features, record: RunRecord) -> Record:
    """Returns the features and the main values of their run as a JSON record, with four significant digits."""
    assert features.spread is not None
    copied = ("name", "hash", "command", "commit", "config", "environment")
    return {
        "kind": KIND,
        **{name: record.get(name) for name in copied},
        "title": features.title,
        "classes": list(features.classes),
        "test_images": record.data.get("test_images"),
        "accuracy": features.accuracy,
        "spread": dataclasses.asdict(features.spread),
        "labels": features.labels.tolist(),
        "points": _rounded(features.points),
        "directions": None if features.directions is None else _rounded(features.directions),
    }


def _rounded(rows: Tensor) -> list[list[float]]:
    return [[float(f"{value:.4g}") for value in row] for row in rows.tolist()]


def write_features(path: Path, record: Record) -> None:
    """Writes the record as one line of JSON."""
    write_atomically(path, (json.dumps(record, allow_nan=False) + "\n").encode())


def read_features(path: Path) -> Features:
    """Reads a file that `write_features` wrote; raises ValueError if it is missing or invalid."""
    try:
        return features_in(read_json(path, any_number=True))
    except KeyError as error:
        raise ValueError(f"{str(path)!r} is not a record of features: it lacks {error}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(path)!r} is not a record of features: {error}") from None


def features_in(record: Record) -> Features:
    """Returns the features of a record; raises ValueError if a value is invalid, and KeyError if one is missing."""
    if not isinstance(record, dict) or record.get("kind") != KIND:
        raise ValueError(f"its kind is not {KIND!r}")
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
