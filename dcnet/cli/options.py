"""Options that several commands share, and the checks of their values."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import tyro

import dcnet
from dcnet import models, training
from dcnet.exit_codes import BAD_INPUT, INTERRUPTED
from dcnet.terminal import visible

if TYPE_CHECKING:
    from torch import nn

    import dcnet.environment
    from dcnet.training import Record, Run

PICTURES = (".png", ".svg")


def arg(metavar: str, default: str | None = None) -> Any:
    """Returns the help settings of an option whose default is None; `default` describes what None means."""
    hint = "(optional)" if default is None else f"(default: {default})"
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=hint)


Device = Literal["auto", "cpu", "cuda"]
Number = Annotated[int, tyro.conf.arg(metavar="N")]
Numbers = Annotated[tuple[int, ...], tyro.conf.arg(metavar="N ...")]
Specs = Annotated[tuple[str, ...], tyro.conf.arg(metavar="SPEC ...")]
OptionalFile = Annotated[Path | None, arg("FILE")]
OptionalFolder = Annotated[Path | None, arg("FOLDER")]
RunsFolder = Annotated[Path | None, arg("FOLDER", "runs")]
DataFolder = Annotated[Path | None, arg("FOLDER", "DCNET_DATA")]
Workers = Annotated[int | None, arg("N", "one per core, up to 8")]
RunNames = Annotated[
    tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...", help_behavior_hint="(required)")
]


@dataclass(frozen=True, kw_only=True)
class JsonOption:
    """Output as JSON."""

    json: bool = False
    """Print one JSON document and nothing else."""


@dataclass(frozen=True, kw_only=True)
class DeviceOption:
    """Where to compute."""

    device: Device = "auto"
    """Where to compute; auto is cuda if there is a GPU."""

    def chosen_device(self) -> Literal["cpu", "cuda"]:
        """Returns the device; raises ValueError if it is not available."""
        return dcnet.environment.choose_device(self.device)


@dataclass(frozen=True, kw_only=True)
class DataOptions(DeviceOption):
    """The folder of the data, worker processes, and the device."""

    data_dir: DataFolder = None
    """The folder of the datasets; missing files are downloaded to a cache."""

    workers: Workers = None
    """The number of processes that read a folder of images."""

    def chosen_workers(self) -> int:
        if self.workers is None:
            return dcnet.environment.default_workers()
        check_at_least(0, "--workers", self.workers)
        return self.workers


@dataclass(frozen=True, kw_only=True)
class RunsOptions:
    """The folder in which runs are found by name."""

    runs: RunsFolder = None
    """The folder that contains the folders of runs."""

    def root(self) -> Path:
        """Returns the given folder, which must exist, or the default one, which may be missing."""
        if self.runs is not None and not self.runs.is_dir():
            raise ValueError(f"--runs must be a folder that contains the folders of runs, not {str(self.runs)!r}")
        return self.runs or training.runs.runs_root()

    def find_runs(self, names: Sequence[str]) -> list[Run]:
        """Finds the runs of these names, without duplicates."""
        if not names:
            raise ValueError("give one or more runs; `dcnet list runs` shows them")
        found = [training.find_run(name, self.root()) for name in dict.fromkeys(names)]
        return list({run.folder.resolve(): run for run in found}.values())


@dataclass(frozen=True, kw_only=True)
class OneRun(RunsOptions):
    """The run that a command uses."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run: its folder, its name, or a unique prefix or suffix of its name."""

    def found(self) -> Run:
        return training.find_run(self.run, self.root())


def check_new_runs_folder(runs: Path | None) -> None:
    """Raises ValueError if the folder of new runs cannot be created because a part of its path is a file."""
    asked = runs or training.runs.runs_root()
    nearest = next(path for path in (asked, *asked.parents) if path.exists())
    if not nearest.is_dir():
        raise ValueError(f"runs cannot be written to {str(asked)!r}: {str(nearest)!r} is not a folder")


def load_run(run: Run) -> tuple[nn.Module, Record]:
    """Loads the trained network of a run, in evaluation mode, and its record."""
    with explain_record_errors(run):
        return training.load_model(run)


@contextmanager
def explain_record_errors(run: Run) -> Iterator[None]:
    """Turns errors of building a network from a damaged record into a ValueError with one sentence."""
    try:
        yield
    except ImportError as error:
        raise ValueError(f"the network of the run {run.folder.name!r} cannot be built: {error}") from None
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{str(run.record_file)!r} does not describe its network: {error!r}") from None


def report_bad_input(work: Callable[[], int]) -> Callable[[], int]:
    """Wraps the work: a ValueError, as for a damaged file, is printed and gives the exit code for bad input."""

    def reporting() -> int:
        try:
            return work()
        except ValueError as error:
            print(f"dcnet: {visible(error)}", file=sys.stderr)
            return BAD_INPUT

    return reporting


def check_at_least(limit: float, option: str, *values: float | None) -> None:
    for value in values:
        if value is not None and not value >= limit:
            raise ValueError(f"{option} must be {limit} or more, not {value}")


def check_above_zero(option: str, value: float | None) -> None:
    if value is not None and not 0 < value < float("inf"):
        raise ValueError(f"{option} must be a number above 0, not {value}")


def output_file(option: str, path: Path, suffixes: Sequence[str] = PICTURES) -> Path:
    """Returns the path; raises an error if it has none of the suffixes or cannot be written."""
    if path.suffix.lower() not in suffixes:
        raise ValueError(f"{option} must be a file such as {' or '.join(suffixes)}, not {str(path)!r}")
    return writable(str(path))


def decoupled_operators(specs: Sequence[str]) -> list[str]:
    """Returns the normalized specs without the plain convolution, which benchmarks always include."""
    checked = dict.fromkeys(one_operator(spec) for spec in specs)
    checked.pop(dcnet.PLAIN, None)
    if not checked:
        plain = f"an operator other than {dcnet.PLAIN!r}, such as tanh-cos"
        raise ValueError(f"--operators must name {plain}, not {list(specs)!r}")
    return list(checked)


def known_networks(names: Sequence[str]) -> list[str]:
    """Returns the names without duplicates; raises an error if one is not a network."""
    for name in names:
        if name.partition(":")[0] not in models.create.prefixes:
            _ = models.networks[name]
    return list(dict.fromkeys(names))


# The rest is for programs with argparse, such as the examples: functions for `type=` raise ArgumentTypeError.


class Parser(argparse.ArgumentParser):
    """A parser that reports an invalid option with one line on stderr and exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}\n")


def one_operator(text: str) -> str:
    """Returns the normalized spec of an operator, or of the plain convolution."""
    try:
        return dcnet.PLAIN if dcnet.is_plain(text) else str(dcnet.Operator.parse(text))
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def whole_number(limit: int) -> Callable[[str], int]:
    """Returns a function that parses whole numbers of at least `limit`."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < limit:
            raise argparse.ArgumentTypeError(f"must be a whole number, {limit} or more, not {text!r}")
        return int(text)

    return read


def writable(text: str) -> Path:
    """Returns the path of a writable file; creates its folder."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: {error.strerror}") from None
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: it is a folder")
    return path


def run_program(main: Callable[[], int | None]) -> NoReturn:
    """Runs `main` and exits with its code; reports an interruption or a missing package in one line."""
    try:
        code = main()
    except ImportError as error:
        print(f"{Path(sys.argv[0]).stem}: {error}", file=sys.stderr)
        code = BAD_INPUT
    except KeyboardInterrupt:
        print(f"{Path(sys.argv[0]).stem}: interrupted before the end", file=sys.stderr)
        code = INTERRUPTED
    sys.exit(code)
