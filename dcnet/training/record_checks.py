"""What the record of a run has to hold to be listed, drawn or copied, and what is wrong with one in a sentence.

Records are brought from other machines, so nothing in one is taken for what it should be. Values that are not named
here may be anything.
"""

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

from dcnet.data import Augmentation
from dcnet.training.config import RunConfig
from dcnet.training.schedules import Schedule

Check = Callable[[Any], bool]
# Of the name of a run, which becomes that of a file.
LONGEST_NAME = 200
# Of images that a network takes, which are held in memory.
LARGEST_SIDE = 10_000


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _side(value: Any) -> bool:
    return _whole(value) and value <= LARGEST_SIDE


def _mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _file_name(value: Any) -> bool:
    """Whether it is one part of a path, that leads nowhere else, and that a terminal only shows."""
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_NAME:
        return False
    return value.isprintable() and not value.startswith(".") and not set(value) & set("/\\")


def _date(value: Any) -> bool:
    try:
        return datetime.fromisoformat(value).astimezone() is not None
    except (OverflowError, TypeError, ValueError):
        return False


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(check(part) for part in value)


NUMBERS, SOME_NUMBERS = _list_of(_number), _list_of(_or_none(_number))
# By the names that lead to a value, of which * is any.
CHECKS: dict[str, tuple[Check, str]] = {
    "name": (_file_name, "a name that a file can have"),
    "hash": (_file_name, "a name that a file can have"),
    "status": (_text, "text"),
    **dict.fromkeys(("command", "commit"), (_or_none(_text), "text")),
    **dict.fromkeys(("steps", "steps_done", "parameters"), (_or_none(_whole), "a whole number")),
    "environment.date": (_or_none(_date), "a date such as 2026-11-15T00:00:00+00:00"),
    **dict.fromkeys(("data.classes", "data.skipped"), (_list_of(_text), "a list of names")),
    **dict.fromkeys(("data.folder", "data.fingerprint", "network_class"), (_text, "text")),
    **dict.fromkeys(("data.train_images", "data.test_images"), (_whole, "a whole number")),
    **dict.fromkeys(("data.channels", "data.image_size"), (_side, f"a whole number up to {LARGEST_SIDE:,}")),
    **dict.fromkeys(("results.*", "timings.*"), (_or_none(_number), "a number")),
    **dict.fromkeys((f"curves.{name}" for name in ("step", "epoch", "learning_rate", "seconds")), (NUMBERS, "numbers")),
    **dict.fromkeys(
        (f"curves.{part}_{name}" for part in ("train", "test") for name in ("loss", "accuracy")),
        (SOME_NUMBERS, "numbers, or null"),
    ),
    "evaluations.*.settings": (_mapping, "an object"),
    **dict.fromkeys(
        ("evaluations.*.results", "evaluations.*.results.transfer", "evaluations.*.results.transfer.source"),
        (_or_none(_mapping), "an object"),
    ),
    "evaluations.*.settings.epsilon": (_number, "a number"),
    "evaluations.*.settings.images": (_whole, "a whole number"),
}


def problem_of(record: Mapping[str, Any]) -> str | None:
    """What is wrong with a record that has config, status and curves as it should; None for nothing."""
    for path, (check, expected) in CHECKS.items():
        for name, value in _values(record, path.split(".")):
            if not check(value):
                return f"{name!r} in it is {_short(value)}, and not {expected}"
    lengths = {len(values) for name, values in record["curves"].items() if f"curves.{name}" in CHECKS}
    if len(lengths) > 1:
        return f"its curves have {min(lengths)} to {max(lengths)} values, and not as many each"
    if record["curves"].get("step") and "test_accuracy" not in record["curves"]:
        return "its curves lack 'test_accuracy'"
    return _problem_of_config(record["config"])


def _values(inside: Any, path: list[str], before: str = "") -> Iterator[tuple[str, Any]]:
    """The values that a path leads to, with the names on the way."""
    if not path:
        yield before, inside
    elif isinstance(inside, dict):
        for name in inside if path[0] == "*" else [path[0]] * (path[0] in inside):
            yield from _values(inside[name], path[1:], f"{before}.{name}" if before else name)


def _problem_of_config(config: Mapping[str, Any]) -> str | None:
    """By the types that a config declares; what only a later version knows may be anything."""
    hints = typing.get_type_hints(RunConfig)
    for declared in dataclasses.fields(RunConfig):
        value = config.get(declared.name)
        if declared.name in config and not _fits(value, hints[declared.name]):
            return f"{declared.name!r} of its config is {_short(value)}"
    return None


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value of JSON is of a type that a config declares."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return any(_fits(value, part) for part in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return isinstance(value, list) and all(_fits(part, typing.get_args(hint)[0]) for part in value)
    if hint is Schedule:
        return isinstance(value, dict) and isinstance(value.get("name"), str)
    if hint is Augmentation:
        return isinstance(value, dict)
    if hint in (float, int):
        return _number(value) and (hint is float or isinstance(value, int))
    return hint is Any or not isinstance(hint, type) or isinstance(value, hint)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
