"""The records of experiments, the status of cells (results and difference from the paper), and the remaining tasks."""

import dataclasses
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcnet.experiments.experiment import NOT_CONVERGED, Cell, Experiment, at_end_of_run
from dcnet.training import Record, Run, RunConfig, all_runs, read_record
from dcnet.training.identity import is_same_run
from dcnet.training.record import file_problem

# The statuses of finished runs.
FINAL = ("done", "diverged")


class RecordIndex:
    """Finds the records of finished runs by config; merges the evaluations of records of the same config.

    `damaged` has unreadable files and invalid records in `folders`, with the problem of each.

    Args:
        runs: the folder of all runs.
        folders: folders with records from other machines, which are searched recursively.
    """

    def __init__(self, runs: Path, folders: Sequence[Path] = ()):
        self.runs = runs
        self.imported: dict[str, Record] = {}
        self.damaged: dict[Path, str] = {}
        for file in _files(folders):
            record = read_final_record(file)
            if record is not None:
                key = record.run_name
                self.imported[key] = _merge(self.imported.get(key), record)
            elif problem := file_problem(file):
                self.damaged[file] = problem

    def record(self, config: RunConfig) -> Record | None:
        """Returns the record of a config; None if its run is not finished."""
        own = read_final_record(Run.of(config, self.runs).record_file)
        own = own if own is None or (is_same_run(own, config) and _has_config(own, config)) else None
        imported = self.imported.get(f"{config.name}-{config.hash}")
        return own if imported is None or not _has_config(imported, config) else _merge(own, imported)


def _has_config(record: Record, config: RunConfig) -> bool:
    """Whether the config of a record is this one, not just its name and hash; True if this version cannot read it."""
    try:
        return record.run_config() == config
    except (KeyError, TypeError, ValueError):
        return True


def _files(folders: Sequence[Path]) -> Iterator[Path]:
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"there is no folder {str(folder)!r}: give one with records of runs")
        yield from sorted(folder.rglob("*.json"))


def read_final_record(file: Path) -> Record | None:
    """Reads the record of a finished run; returns None for other records and other files, such as of a benchmark."""
    try:
        record = read_record(file)
    except ValueError:
        return None
    return record if record.status in FINAL and record.name and record.hash else None


def _merge(first: Record | None, second: Record) -> Record:
    """Returns the first record with the evaluations of both; a "done" one takes precedence over a "diverged" one."""
    if first is None or (first.status, second.status) == ("diverged", "done"):
        return second
    return dataclasses.replace(first, evaluations=second.evaluations | first.evaluations)


# The largest number of seeds per cell.
MAX_SEEDS = 32
# Matches the end of every run name.
SEED = re.compile(r"-seed(\d+)-\w+$")
UNMEASURED = "not in a smoke test"
# A network below this multiple of chance accuracy counts as diverged.
GUESSING = 2.0
# Tables show the value of each seed if the deviation is larger than this, in the unit of the table.
WIDE_DEVIATION = 5.0
# Decimals in tables, as in the paper.
DIGITS = 2


@dataclass(frozen=True)
class CellStatus:
    """The results of a cell.

    Attributes:
        cell: the cell.
        values: numbers of the runs that converged.
        diverged: number of runs that diverged, or whose accuracy is hardly above chance.
        seeds: number of requested runs; there may be more.
        unmeasured: number of finished runs, if the cell has no metric.
        seconds: training times of the runs that were trained to the end.
        all_seconds: the sum of all training times, also of runs that diverged.
    """

    cell: Cell
    values: tuple[float, ...]
    diverged: int
    seeds: int
    unmeasured: int = 0
    seconds: tuple[float, ...] = ()
    all_seconds: float = 0.0

    @property
    def runs(self) -> int:
        """The number of finished runs."""
        return len(self.values) + self.diverged + self.unmeasured

    @property
    def state(self) -> str:
        """One of "quoted", "missing", "partial" and "done"."""
        if self.cell.config is None:
            return "quoted"
        return "done" if self.runs >= self.seeds else "partial" if self.runs else "missing"

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def deviation(self) -> float | None:
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def difference(self) -> float | None:
        """Our mean minus the paper's number, rounded as in tables; None if one of them is missing."""
        paper = self.cell.paper
        if self.mean is None or not isinstance(paper, float | int):
            return None
        # Adding 0.0 turns -0.0 into 0.0.
        return round(round(self.mean, DIGITS) - paper, DIGITS) + 0.0

    @property
    def reached(self) -> int | None:
        """The number of runs that reached the target; None without a target."""
        target = self.cell.target
        return None if target is None else sum(value >= target for value in self.values)

    def misses_by(self, higher_is_better: bool) -> float | None:
        """Returns how much worse our mean is than the paper's number; 0 if it is not worse, None if unknown."""
        if self.difference is None:
            return None
        return max(0.0, -self.difference if higher_is_better else self.difference)

    def to_json(self, higher_is_better: bool) -> dict[str, Any]:
        return {
            "row": self.cell.row,
            "column": self.cell.column,
            "state": self.state,
            "seeds": self.seeds,
            "values": list(self.values),
            "diverged": self.diverged,
            "unmeasured": self.unmeasured,
            "mean": self.mean,
            "deviation": self.deviation,
            "paper": self.cell.paper,
            "difference": self.difference,
            "misses_by": self.misses_by(higher_is_better),
            **({} if self.reached is None else {"target": self.cell.target, "reached": self.reached}),
        }

    def __str__(self) -> str:
        """Formats our result, and in parentheses the paper's number and the difference, or the runs at the target."""
        ours = {"quoted": "-", "missing": "missing"}.get(self.state) or self.ours
        about = "" if self.cell.paper is None else self._paper()
        if self.reached is not None and self.runs:
            about = f"{self.reached} of {self.runs} reach {self.cell.target:g}"
        return f"{ours} ({about})" if about else ours

    @property
    def ours(self) -> str:
        """Our result: mean and deviation, the value of each seed if they differ widely, and the diverged runs."""
        if self.mean is None:
            return UNMEASURED if self.unmeasured else NOT_CONVERGED
        diverged = f", {self.diverged} {NOT_CONVERGED}" if self.diverged else ""
        return f"{self.mean:.2f}{self._spread()}{diverged}"

    def _spread(self) -> str:
        if self.deviation is None:
            return ""
        each = f" [{' '.join(f'{value:.1f}' for value in self.values)}]" if self.deviation > WIDE_DEVIATION else ""
        return f" ± {self.deviation:.2f}{each}"

    def _paper(self) -> str:
        paper = self.cell.paper
        shown = paper if isinstance(paper, str) else f"{paper:.2f}"
        return shown if self.difference is None else f"{shown}, {self.difference:+.2f}"


def status_of(experiment: Experiment, index: RecordIndex, seeds: int | None = None) -> list[CellStatus]:
    """Returns the status of every cell, over all seeds with a record or over the first `seeds`."""
    pairs = cell_records(experiment, index, seeds)
    return [cell_status(cell, records, seeds or experiment.seeds) for cell, records in pairs]


def pooled_deviation(statuses: Iterable[CellStatus]) -> float | None:
    """Returns the standard deviation of a single run, pooled over all cells with several runs; None without any."""
    several = [(len(one.values) - 1, one.deviation) for one in statuses if one.deviation is not None]
    if not several:
        return None
    return math.sqrt(sum(free * deviation**2 for free, deviation in several) / sum(free for free, _ in several))


def cell_records(
    experiment: Experiment, index: RecordIndex, seeds: int | None = None
) -> list[tuple[Cell, list[Record]]]:
    """Returns every cell with the records of its runs, over all seeds with a record or over the first `seeds`."""
    # Hashing a config takes a millisecond, so only seeds that occur in the name of any run are tried.
    recorded = [] if seeds else sorted(_recorded_seeds(index))
    found = []
    for cell in experiment.cells:
        configs = cell.configs(seeds) if seeds else _with_seeds(cell, recorded)
        found.append((cell, [record for config in configs if (record := index.record(config)) is not None]))
    return found


def _recorded_seeds(index: RecordIndex) -> set[int]:
    """Returns the seeds in the names of all runs."""
    names = [*index.imported, *(run.folder.name for run in all_runs(index.runs))]
    return {int(found[1]) for name in names if (found := SEED.search(name))}


def _with_seeds(cell: Cell, seeds: Sequence[int]) -> list[RunConfig]:
    """Returns the configs of those seeds that are in the range of the cell."""
    if cell.config is None:
        return []
    own = range(cell.first_seed, cell.first_seed + (cell.seeds or MAX_SEEDS))
    return [dataclasses.replace(cell.config, seed=seed) for seed in seeds if seed in own]


def cell_status(cell: Cell, records: list[Record], seeds: int) -> CellStatus:
    """Returns the status of a cell, given the records of its runs."""
    seeds = cell.seeds or seeds
    done = [record for record in records if record.status == "done"]
    diverged = sum(record.status == "diverged" for record in records)
    if not cell.metric:
        return CellStatus(cell, (), diverged, seeds, unmeasured=len(done))
    learned = [record for record in done if not failed_to_learn(record)]
    values = [value for record in learned if (value := cell.value(record)) is not None]
    seconds = tuple(record.timings.training or 0.0 for record in done)
    spent = math.fsum(record.timings.training or 0.0 for record in records)
    return CellStatus(cell, tuple(values), diverged + len(done) - len(learned), seeds, 0, seconds, spent)


def failed_to_learn(record: Record) -> bool:
    """Whether the test accuracy is hardly above chance."""
    classes, error = len(record.data.classes), record.results.test_error if record.results else None
    return classes > GUESSING and error is not None and 100 - error < GUESSING * 100 / classes


@dataclass(frozen=True)
class Task:
    """A training run, or evaluations of its trained network.

    Attributes:
        config: the config of the run.
        evaluations: names of the missing evaluations; empty for training.
        after: names of runs that must end first, since an evaluation may need other networks.
        at_end: names of evaluations that are a part of a training run.
    """

    config: RunConfig
    evaluations: tuple[str, ...] = ()
    after: frozenset[str] = frozenset()
    at_end: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of the run."""
        return f"{self.config.name}-{self.config.hash}"

    @property
    def label(self) -> str:
        return f"{self.name}: {', '.join(self.evaluations)}" if self.evaluations else self.name


def plan_tasks(experiments: Sequence[Experiment], index: RecordIndex, seeds: int | None = None) -> list[Task]:
    """Returns tasks for runs without a record and for missing evaluations, all of the first seed before the second."""
    tasks: list[Task] = []
    for runs in _runs_by_seed(experiments, seeds):
        trainings = [
            Task(config, at_end=tuple(name for name in names if name in at_end_of_run))
            for config, names in runs.items()
            if index.record(config) is None
        ]
        before = frozenset(task.name for task in trainings)
        tasks += trainings
        tasks += [task for config in runs for task in _missing_evaluations(config, runs[config], index, before)]
    return tasks


def _missing_evaluations(
    config: RunConfig, names: Iterable[str], index: RecordIndex, before: frozenset[str]
) -> list[Task]:
    """Returns a task for the missing evaluations; no task if none is missing or the run diverged.

    Those at the end of a run are missing only if it has a record without them.
    """
    record = index.record(config)
    known = at_end_of_run if record is None else record.evaluations
    missing = tuple(name for name in names if name not in known)
    return [Task(config, missing, before)] if missing and (record is None or record.status == "done") else []


def _runs_by_seed(experiments: Sequence[Experiment], seeds: int | None) -> list[dict[RunConfig, list[str]]]:
    """Returns all runs with their evaluations, in one dict for the first seeds of cells, one for the second, ...

    A run that several cells share is in the earliest of these dicts.
    """
    places: dict[RunConfig, int] = {}
    wanted: dict[RunConfig, list[str]] = {}
    for experiment in experiments:
        for cell in experiment.cells if experiment.not_run is None else ():
            for place, config in enumerate(cell.configs(seeds or experiment.seeds)):
                places[config] = min(place, places.get(config, place))
                names = wanted.setdefault(config, [])
                if cell.evaluation is not None and cell.evaluation not in names:
                    names.append(cell.evaluation)
    return [
        {config: wanted[config] for config in wanted if places[config] == place}
        for place in sorted(set(places.values()))
    ]
