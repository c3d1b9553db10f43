"""What a record of features has to hold to be drawn, and what is wrong with it in one sentence."""

import dataclasses
from typing import Any

from dcnet.report.spread import Spread

Record = dict[str, Any]
# Of float32, in which features are.
LARGEST = 3.4e38


def check_features(record: Record) -> None:
    """Refuses a record that would give no picture or a wrong one; a KeyError says what it lacks."""
    _check_words(record["title"], record["classes"])
    points = _check_rows("points", record["points"])
    _check_labels(record["labels"], len(record["points"]), len(record["classes"]))
    if record["directions"] is not None:
        width = _check_rows("directions", record["directions"])
        if len(record["directions"]) != len(record["classes"]):
            found = f"{len(record['directions'])} directions and {len(record['classes'])} classes"
            raise ValueError(f"it has {found}: each class has one direction")
        if width != points:
            raise ValueError(f"its points have {points} numbers each and its directions {width}: they must be alike")
    _check_spread(record["spread"])
    if record["accuracy"] is not None and not is_finite(record["accuracy"]):
        raise ValueError(f"its accuracy must be a finite number or null, not {record['accuracy']!r}")


def is_finite(value: Any) -> bool:
    """Whether it is a number that can be drawn; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def _check_words(title: Any, classes: Any) -> None:
    if not isinstance(title, str):
        raise ValueError(f"its title must be text, not {title!r}")
    if not isinstance(classes, list) or not classes or not all(isinstance(name, str) for name in classes):
        raise ValueError(f"its classes must be a list of names, not {_short(classes)}")


def _check_rows(what: str, rows: Any) -> int:
    """How many numbers each row has, 2 or 3."""
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) for row in rows):
        raise ValueError(f"its {what} must be a list of lists of numbers, not {_short(rows)}")
    width = len(rows[0])
    for at, row in enumerate(rows):
        if len(row) not in (2, 3) or len(row) != width:
            raise ValueError(f"its {what} must have 2 numbers each, or 3 each, but number {at} has {len(row)}")
        if not all(is_finite(value) for value in row):
            raise ValueError(f"its {what} must be finite numbers, but number {at} is {_short(row)}")
    return width


def _check_labels(labels: Any, points: int, classes: int) -> None:
    if not isinstance(labels, list) or len(labels) != points:
        count = f"{len(labels)} labels" if isinstance(labels, list) else f"the labels {_short(labels)}"
        raise ValueError(f"it has {count} for {points} points: each point has one label")
    for label in labels:
        if type(label) is not int or not 0 <= label < classes:
            raise ValueError(f"its labels must be from 0 to {classes - 1}, as it has {classes} classes, not {label!r}")


def _check_spread(spread: Any) -> None:
    names = [field.name for field in dataclasses.fields(Spread)]
    if not isinstance(spread, dict) or set(spread) != set(names):
        raise ValueError(f"its spread must have {', '.join(names)}, and nothing else, not {_short(spread)}")
    for name, value in spread.items():
        if not is_finite(value):
            raise ValueError(f"{name} of its spread must be a finite number, not {value!r}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
