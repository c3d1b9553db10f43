"""Curves of robustness wherever the evaluations of a run have some; accuracies are shares from 0 to 1.

Three forms are known: `epsilons` (or `severities`) beside `accuracies`; `by_epsilon` or `by_steps`, from numbers to
accuracies; and `accuracies` of corruptions by their kind, one for each severity.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LISTS = {"epsilons": "epsilon", "severities": "severity"}
MAPPINGS = {"by_epsilon": "epsilon", "by_steps": "steps"}


@dataclass(frozen=True)
class Curve:
    """Where it was found, by the keys that lead to it, what its axis is, and its points from left to right."""

    where: tuple[str, ...]
    axis: str
    points: tuple[tuple[float, float], ...]

    @property
    def name(self) -> str:
        """The keys as words."""
        return " ".join(self.where).replace("_", " ")


def curves_in(value: Any, where: tuple[str, ...] = ()) -> Iterator[Curve]:
    """Every curve in an evaluation, and in those inside of it."""
    if not isinstance(value, Mapping):
        return
    accuracies: Any = value.get("accuracies")
    for key, axis in LISTS.items():
        if _numbers(value.get(key)) and _numbers(accuracies):
            yield _curve(where, axis, zip(value[key], accuracies, strict=False))
    if isinstance(accuracies, Mapping):
        for kind, found in accuracies.items():
            if _numbers(found):
                yield _curve((*where, kind), "severity", enumerate(found, start=1))
    for key, part in value.items():
        if key in MAPPINGS and _by_number(part):
            yield _curve((*where, key), MAPPINGS[key], ((float(at), found) for at, found in part.items()))
        else:
            yield from curves_in(part, (*where, key))


def _curve(where: Sequence[str], axis: str, points: Any) -> Curve:
    return Curve(tuple(where), axis, tuple(sorted((float(x), float(y)) for x, y in points)))


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_number(part) for part in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _by_number(value: Any) -> bool:
    if not isinstance(value, Mapping) or not value or not all(_is_number(part) for part in value.values()):
        return False
    try:
        return all(float(key) >= 0 for key in value)
    except ValueError:
        return False
