"""The records that the page shows."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dcnet.experiments import CellStatus, Experiment, select_experiments
from dcnet.experiments.status import RecordIndex, cell_records, cell_status, failed_to_learn
from dcnet.files import read_json
from dcnet.report.features import KIND
from dcnet.training import Record, RunConfig

Values = dict[str, Any]

# The page ignores the folder of runs, and uses records only.
NO_RUNS = Path("/nonexistent")


class CachedIndex(RecordIndex):
    """Caches lookups, since computing the hash of a config is slow and cells share runs."""

    def __init__(self, folders: Sequence[Path]):
        super().__init__(NO_RUNS, folders)
        self._found: dict[RunConfig, Record | None] = {}

    def record(self, config: RunConfig) -> Record | None:
        if config not in self._found:
            self._found[config] = super().record(config)
        return self._found[config]


@dataclass(frozen=True)
class CellResult:
    """The status of a cell, and the records that it is computed from."""

    status: CellStatus
    records: tuple[Record, ...]


@dataclass(frozen=True)
class Sources:
    """Records of runs, benchmarks and features in folders, which are searched recursively for JSON files."""

    folders: tuple[Path, ...]

    @cached_property
    def known(self) -> RecordIndex:
        """The records of finished runs; raises ValueError if a folder does not exist."""
        return CachedIndex(self.folders)

    @cached_property
    def experiments(self) -> list[tuple[Experiment, list[CellResult]]]:
        """All experiments with their cells: the tables of the paper by number, then the others."""
        ordered = sorted(select_experiments(["all"]), key=lambda one: (not re.match(r"table\d", one.name), one.name))
        grown = [experiment.at(self.known.record) for experiment in ordered]
        return [(experiment, self._cells(experiment)) for experiment in grown]

    def _cells(self, experiment: Experiment) -> list[CellResult]:
        """Returns every cell with the records of all of its seeds, even if there are more than required."""
        found = []
        for cell, records in cell_records(experiment, self.known):
            counted = [one for one in records if not _converged(one) or cell.value(one) is not None]
            found.append(CellResult(cell_status(cell, records, experiment.seeds), tuple(counted)))
        return found

    @property
    def runs(self) -> list[Record]:
        """The records of runs, sorted by name."""
        return [record for _, record in sorted(self.known.imported.items())]

    @property
    def curves(self) -> list[Record]:
        """The records of runs that were evaluated during training."""
        return [record for record in self.runs if record.curves.step]

    @cached_property
    def others(self) -> dict[str, Values]:
        """All other JSON objects, by file name."""
        found: dict[str, Values] = {}
        for path in dict.fromkeys(path for folder in self.folders for path in sorted(folder.rglob("*.json"))):
            value = _read(path)
            if value is not None and "curves" not in value:
                found[unique_name(path.stem, found)] = value
        return found

    @property
    def benchmarks(self) -> dict[str, Values]:
        """The records of complete benchmarks, by file name."""
        return {name: one for name, one in self.others.items() if "benchmark" in one and one.get("complete")}

    @property
    def features(self) -> dict[str, Values]:
        """The records written by `dcnet plot features --records`, by file name."""
        return {name: record for name, record in self.others.items() if record.get("kind") == KIND}


def _converged(record: Record) -> bool:
    return record.status != "diverged" and not failed_to_learn(record)


def _read(path: Path) -> Values | None:
    try:
        value = read_json(path, any_number=True)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def unique_name(name: str, taken: Iterable[str]) -> str:
    """Returns the name, with a number appended if it is taken."""
    used, count, free = set(taken), 2, name
    while free in used:
        free, count = f"{name}-{count}", count + 1
    return free
