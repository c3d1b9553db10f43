"""The records that a page is made of."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dcnet.experiments import Experiment
from dcnet.experiments.known import Known
from dcnet.files import read_json
from dcnet.report.features import KIND
from dcnet.report.page.cells import Found, all_experiments, found_in
from dcnet.training import RunConfig

Record = dict[str, Any]

# Runs are found by their records alone, wherever these lie.
NOWHERE = Path("/nonexistent")


class Remembering(Known):
    """The same, without looking twice: to tell which run a config is takes a millisecond, and cells share runs."""

    def __init__(self, folders: Sequence[Path]):
        super().__init__(NOWHERE, folders)
        self.seen: dict[RunConfig, Record | None] = {}

    def record(self, config: RunConfig) -> Record | None:
        if config not in self.seen:
            self.seen[config] = super().record(config)
        return self.seen[config]


@dataclass(frozen=True)
class Sources:
    """Folders with records in files at any depth: those of runs, of benchmarks, and of features."""

    folders: tuple[Path, ...]

    @cached_property
    def known(self) -> Known:
        """The runs that came to their end; a ValueError in one sentence if a folder is not there."""
        return Remembering(self.folders)

    @cached_property
    def experiments(self) -> list[tuple[Experiment, list[Found]]]:
        """All experiments with their cells as they stand."""
        return [(experiment, found_in(experiment, self.known)) for experiment in all_experiments()]

    @property
    def runs(self) -> list[Record]:
        """The records of runs, by their names."""
        return [record for _, record in sorted(self.known.brought.items())]

    @property
    def curves(self) -> list[Record]:
        """Those of runs that were trained, with the error at each evaluation."""
        return [record for record in self.runs if record["curves"].get("step")]

    @cached_property
    def others(self) -> dict[str, Record]:
        """All other JSON documents that are objects, by the names of their files."""
        found: dict[str, Record] = {}
        for path in _files(self.folders):
            value = _read(path)
            if value is not None and "curves" not in value:
                found[free(path.stem, found)] = value
        return found

    @property
    def benchmarks(self) -> dict[str, Record]:
        """The records of benchmarks that were run to their end, by the names of their files."""
        return {
            name: record for name, record in self.others.items() if "benchmark" in record and record.get("complete")
        }

    @property
    def features(self) -> dict[str, Record]:
        """What `dcnet plot features --records` wrote, by the names of the files."""
        return {name: record for name, record in self.others.items() if record.get("kind") == KIND}


def _files(folders: Sequence[Path]) -> Iterable[Path]:
    return dict.fromkeys(path for folder in folders for path in sorted(folder.rglob("*.json")))


def _read(path: Path) -> Record | None:
    try:
        value = read_json(path, any_number=True)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def free(name: str, taken: Iterable[str]) -> str:
    """The name, with a number where another has it."""
    used, count, free = set(taken), 2, name
    while free in used:
        free, count = f"{name}-{count}", count + 1
    return free
