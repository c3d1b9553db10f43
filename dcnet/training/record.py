"""The record of a run: its types, its JSON, and its validation.

Records are copied between machines and versions, so every value is checked before it is used. Unknown names are kept.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, Self

from dcnet.checks import is_number, shortened
from dcnet.data import Augmentation
from dcnet.files import read_json, reason_of, write_json
from dcnet.training.config import LONGEST_NAME, RunConfig, config_of, with_defaults
from dcnet.training.schedules import Schedule

# Training overwrites the records of runs with one of these statuses, including their evaluations.
UNFINISHED = ("running", "interrupted", "diverged")
# The largest image side, since images are held in memory.
LARGEST_SIDE = 10_000


@dataclass(kw_only=True)
class Values:
    """A JSON object as a dataclass.

    Attributes:
        extra: values of names that have no field.
        given: names that are written even if their fields have the default value, such as all names that were read.
    """

    required: ClassVar[tuple[str, ...]] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    given: frozenset[str] = field(default=frozenset(), repr=False, compare=False)

    @classmethod
    def names(cls) -> list[str]:
        """Returns the names of the fields that are written."""
        return [declared.name for declared in dataclasses.fields(cls) if declared.name not in ("extra", "given")]

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Reads a JSON object; `record_problem` has checked its values."""
        own = {name: values[name] for name in cls.names() if name in values}
        return cls(**own, extra={name: values[name] for name in values if name not in own}, given=frozenset(values))

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON object: the fields in their order, then `extra`."""
        default = type(self)()
        always = {*self.required, *self.given}
        kept = [name for name in self.names() if name in always or getattr(self, name) != getattr(default, name)]
        return {name: _to_json(getattr(self, name)) for name in kept} | self.extra

    def get(self, name: str | int) -> Any:
        """Returns the value of a name, from its field or from `extra`; None if there is none."""
        return getattr(self, str(name)) if name in self.names() else self.extra.get(str(name))


def _to_json(value: Any) -> Any:
    if isinstance(value, Values):
        return value.to_json()
    return {name: _to_json(part) for name, part in value.items()} if isinstance(value, dict) else value


@dataclass(kw_only=True)
class Point:
    """One evaluation during training; `refreshed_accuracy` is the test accuracy with refreshed statistics, if any."""

    step: int
    epoch: float
    learning_rate: float
    train_loss: float
    train_accuracy: float
    test_loss: float
    test_accuracy: float
    seconds: float
    refreshed_accuracy: float | None = None


@dataclass(kw_only=True)
class Curves(Values):
    """Lists with one value per evaluation during training; None for a value that was not finite or not measured.

    `refreshed_accuracy` is empty if the statistics were never refreshed.
    """

    step: list[int] = field(default_factory=list)
    epoch: list[float] = field(default_factory=list)
    learning_rate: list[float] = field(default_factory=list)
    train_loss: list[float] = field(default_factory=list)
    train_accuracy: list[float] = field(default_factory=list)
    test_loss: list[float | None] = field(default_factory=list)
    test_accuracy: list[float | None] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    refreshed_accuracy: list[float | None] = field(default_factory=list)

    def add(self, point: Point) -> None:
        """Appends an evaluation."""
        values = dict(vars(point))
        refreshed = values.pop("refreshed_accuracy")
        if refreshed is not None or self.refreshed_accuracy:
            # A run may be resumed with the other setting.
            self.refreshed_accuracy += [None] * (len(self) - len(self.refreshed_accuracy))
            self.refreshed_accuracy.append(None if refreshed is None else finite(refreshed))
        for name, value in values.items():
            getattr(self, name).append(finite(value))

    def __len__(self) -> int:
        return len(self.step)


def finite(value: float) -> float | None:
    """Returns the value; None for NaN and infinity, which JSON lacks."""
    return value if math.isfinite(value) else None


@dataclass(kw_only=True)
class Results(Values):
    """Accuracy and error in %, and loss, after the last step; None for a loss that is not finite."""

    test_accuracy: float | None = None
    test_error: float | None = None
    test_loss: float | None = None
    train_loss: float | None = None
    train_accuracy: float | None = None


@dataclass(kw_only=True)
class Timings(Values):
    """Seconds by phase and in total, milliseconds per step and images per second."""

    start: float | None = None
    training: float | None = None
    evaluation: float | None = None
    saving: float | None = None
    total: float | None = None
    step_ms: float | None = None
    images_per_second: float | None = None


@dataclass(kw_only=True)
class Evaluation(Values):
    """Measurements of a trained network, such as those of `dcnet attack`; most are in `extra`."""

    command: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    results: dict[str, Any] | None = None


@dataclass(kw_only=True)
class DataDescription(Values):
    """The dataset of a run; empty or 0 if a record lacks the value.

    Attributes:
        fingerprint: fingerprint of the contents.
        folder: folder of the files, if the dataset was read from files of the user.
        image_files: whether the dataset is a folder of images.
        held_out: share of the images held out as a test set, for a folder without one.
        skipped: files that could not be read.
    """

    name: str = ""
    classes: list[str] = field(default_factory=list)
    channels: int = 0
    image_size: int = 0
    train_images: int = 0
    test_images: int = 0
    fingerprint: str | None = None
    image_files: bool = False
    held_out: float | None = None
    skipped: list[str] = field(default_factory=list)
    folder: str | None = None


@dataclass(kw_only=True)
class Record(Values):
    """All information about a run.

    Attributes:
        status: "running", "interrupted", "diverged", "done", or "converted" for a network that was not trained.
        command: a command that trains the same run; None for custom networks and datasets.
        config: the config as JSON values, written by any version of dcnet.
        execution: device, number of processes and such, which do not change the results.
        weights: the pretrained weights that the run started from.
        network_class: the class of a custom network.
        resumed_at: the steps after which the run was resumed.
    """

    required: ClassVar[tuple[str, ...]] = ("config", "status", "curves")
    name: str = ""
    hash: str = ""
    status: str = ""
    command: str | None = None
    commit: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    data: DataDescription = field(default_factory=DataDescription)
    curves: Curves = field(default_factory=Curves)
    results: Results | None = None
    weights: dict[str, Any] | None = None
    steps: int | None = None
    steps_per_epoch: int | None = None
    parameters: int | None = None
    execution: dict[str, Any] = field(default_factory=dict)
    network_class: str | None = None
    resumed_at: list[int] = field(default_factory=list)
    steps_done: int | None = None
    timings: Timings = field(default_factory=Timings)
    evaluations: dict[str, Evaluation] = field(default_factory=dict)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        parts = {name: kind.from_json(values[name]) for name, kind in PARTS.items() if values.get(name) is not None}
        found = {name: Evaluation.from_json(one) for name, one in values.get("evaluations", {}).items()}
        return super().from_json({**values, **parts, **({"evaluations": found} if "evaluations" in values else {})})

    @property
    def run_name(self) -> str:
        """The name of the folder of the run."""
        return f"{self.name}-{self.hash}"

    @property
    def settings(self) -> dict[str, Any]:
        """The config, with defaults for fields that its version did not have."""
        return with_defaults(self.config)

    def run_config(self) -> RunConfig:
        """Returns the config; raises ValueError, KeyError or TypeError if this version cannot read it."""
        return config_of(self.config)

    def value(self, path: tuple[str | int, ...]) -> Any:
        """Returns the value at a path of names and list indices; None if there is none."""
        found: Any = self
        for name in path:
            try:
                found = found.get(name) if isinstance(found, Values) else found[name]
            except (KeyError, IndexError, TypeError):
                return None
        return found


PARTS: dict[str, type[Values]] = {
    "data": DataDescription,
    "curves": Curves,
    "results": Results,
    "timings": Timings,
}


def read_record(path: Path) -> Record:
    """Reads a record from a file or the folder of a run; raises ValueError if it is missing or invalid."""
    file = path / "record.json" if path.is_dir() else path
    try:
        values = read_json(file)
    except FileNotFoundError:
        raise ValueError(f"there is no record at {str(file)!r}: give a run, see `dcnet list runs`") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(file)!r} is not a record of a run: {reason_of(error)}") from None
    if problem := record_problem(values):
        raise ValueError(f"{str(file)!r} is not a record of a run: {problem}")
    return Record.from_json(values)


def write_record(path: Path, record: Record) -> None:
    """Writes the record atomically."""
    write_json(path, record.to_json())


def file_problem(file: Path) -> str | None:
    """Returns the problem of a file that is not JSON, or of an invalid record; None for any other file."""
    try:
        found = read_json(file)
    except IsADirectoryError:
        return None
    except (OSError, ValueError) as error:
        return reason_of(error)
    return record_problem(found) if isinstance(found, dict) and found.keys() >= set(Record.required) else None


Check = Callable[[Any], bool]


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _side(value: Any) -> bool:
    return _whole(value) and value <= LARGEST_SIDE


def _mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _file_name(value: Any) -> bool:
    """Whether the value is a printable file name that is not hidden."""
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


OBJECT, LACKING = "an object", "it lacks config, status or curves"
_TRANSFER = "evaluations.*.results.transfer"
# Each check with the words for what it expects, and the paths of the values to check; * matches any name.
CHECKS: tuple[tuple[Check, str, str], ...] = (
    (_mapping, OBJECT, "data environment evaluations timings execution evaluations.* evaluations.*.settings"),
    # An unfinished run has no results.
    (_or_none(_mapping), OBJECT, f"results weights evaluations.*.results {_TRANSFER} {_TRANSFER}.source"),
    (_file_name, "a name that a file can have", "name hash"),
    (_text, "text", "status network_class data.folder data.fingerprint"),
    (_or_none(_text), "text", "command commit"),
    (_or_none(_whole), "a whole number", "steps steps_done parameters"),
    (_list_of(_whole), "a list of whole numbers", "resumed_at"),
    (_or_none(_date), "a date such as 2026-11-15T00:00:00+00:00", "environment.date"),
    (_list_of(_text), "a list of names", "data.classes data.skipped"),
    (_whole, "a whole number", "data.train_images data.test_images evaluations.*.settings.images"),
    (_side, f"a whole number up to {LARGEST_SIDE:,}", "data.channels data.image_size"),
    (is_number, "a number", "evaluations.*.settings.epsilon"),
    (_or_none(is_number), "a number", "results.* timings.*"),
    (_list_of(is_number), "numbers", "curves.step curves.epoch curves.learning_rate curves.seconds"),
    (
        _list_of(_or_none(is_number)),
        "numbers, or null",
        "curves.train_loss curves.train_accuracy curves.test_loss curves.test_accuracy curves.refreshed_accuracy",
    ),
)


def record_problem(values: Any) -> str | None:
    """Returns why a JSON value is not a valid record of a run; None if it is valid."""
    if not isinstance(values, dict) or "status" not in values:
        return LACKING
    if not all(isinstance(values.get(name), dict) for name in ("config", "curves")):
        return LACKING
    for check, expected, paths in CHECKS:
        for name, value in (found for path in paths.split() for found in _values(values, path.split("."))):
            if not check(value):
                return f"{name!r} is {shortened(value)}: expected {expected}"
    return _problem_of_curves(values["curves"]) or _problem_of_config(values["config"])


def _values(inside: Any, path: list[str], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values that match a path, with their full names."""
    if not path:
        yield before, inside
    elif isinstance(inside, dict):
        for name in inside if path[0] == "*" else [path[0]] * (path[0] in inside):
            yield from _values(inside[name], path[1:], f"{before}.{name}" if before else name)


def _problem_of_curves(curves: Mapping[str, Any]) -> str | None:
    lengths = {
        len(values)
        for name, values in curves.items()
        if name in Curves.names() and (values or name != "refreshed_accuracy")
    }
    if len(lengths) > 1:
        return f"its curves have {min(lengths)} to {max(lengths)} values: expected the same number"
    if curves.get("step") and "test_accuracy" not in curves:
        return "its curves lack 'test_accuracy'"
    return None


def _problem_of_config(config: Mapping[str, Any]) -> str | None:
    """Checks the fields of `RunConfig` by their types; unknown names may have any value."""
    hints = typing.get_type_hints(RunConfig)
    for declared in dataclasses.fields(RunConfig):
        value = config.get(declared.name)
        if declared.name in config and not _fits(value, hints[declared.name]):
            return f"{declared.name!r} in its config has an invalid value, {shortened(value)}"
    return None


def _fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value has the type of a config field."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return any(_fits(value, part) for part in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return isinstance(value, list) and all(_fits(part, typing.get_args(hint)[0]) for part in value)
    if hint is Schedule:
        return isinstance(value, dict) and isinstance(value.get("name"), str)
    if hint is Augmentation:
        return isinstance(value, dict)
    if hint in (float, int):
        return is_number(value) and (hint is float or isinstance(value, int))
    return hint is Any or not isinstance(hint, type) or isinstance(value, hint)
