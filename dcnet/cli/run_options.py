"""Options that name runs, and what is wrong with them in one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

if TYPE_CHECKING:
    from torch import nn

    from dcnet.training import Run


DataFolder = Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="(default: DCNET_DATA)")]

# The exit code where an input turns out to be wrong only when the work is under way.
WRONG_INPUT = 2


@dataclass(frozen=True, kw_only=True)
class RunsOptions:
    """Where runs are looked for by their names."""

    runs: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="(default: runs)")] = None
    """Where the folders of runs are."""

    def root(self) -> Path:
        """The folder that is asked for, which must be there, or the usual one, which need not."""
        from dcnet.training.runs import runs_root

        if self.runs is not None and not self.runs.is_dir():
            raise ValueError(
                f"--runs is {str(self.runs)!r}, which is no folder: give one with the folders of runs in it"
            )
        return self.runs or runs_root()


@dataclass(frozen=True, kw_only=True)
class OneRun(RunsOptions):
    """A run by its folder or its name."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run: its folder, its name, or as much of the beginning or end of the name as no other run has."""

    def found(self) -> Run:
        from dcnet.training import find_run

        return find_run(self.run, self.root())


def check_runs_to_be(runs: Path | None) -> None:
    """Refuses a folder for new runs that cannot be made, since a file is in its place or above it."""
    from dcnet.training.runs import runs_root

    asked = runs or runs_root()
    nearest = next(path for path in (asked, *asked.parents) if path.exists())
    if not nearest.is_dir():
        raise ValueError(f"runs cannot be put into {str(asked)!r}, since {str(nearest)!r} is no folder: give one")


def records_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The records of runs that have curves."""
    records = []
    for run in runs:
        record = run.record()
        if not record["curves"].get("step"):
            raise ValueError(f"the run {run.folder.name!r} has no curves: its status is {record['status']!r}")
        records.append(record)
    return records


def loaded(run: Run) -> tuple[nn.Module, dict[str, Any]]:
    """The trained network of a run, in evaluation mode, and its record."""
    from dcnet.training import load_model

    with described(run):
        return load_model(run)


@contextmanager
def described(run: Run) -> Iterator[None]:
    """Inside, a network that cannot be built from the record of a run is a ValueError in one sentence."""
    try:
        yield
    except ImportError as error:
        raise ValueError(f"the network of the run {run.folder.name!r} cannot be built: {error}") from None
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{str(run.record_file)!r} does not describe its network: {error!r}") from None
