"""What is there of an experiment, what is missing, and how far from the paper it is."""

import dataclasses
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dcnet.experiments.experiment import NOT_CONVERGED, Cell, Experiment, Record
from dcnet.experiments.known import Known
from dcnet.training import RunConfig, all_runs

# Nobody runs more seeds than that; those of networks that attacks are made with begin beyond.
MOST_SEEDS = 32
# What the name of every run ends with.
SEED = re.compile(r"-seed(\d+)-\w+$")
UNMEASURED = "not in a smoke test"
# Who is right about fewer images than this many times what guessing gets has learned nothing.
GUESSING = 2.0
# Beyond that, in the unit of the table, seeds end in different ways, and a mean tells of none of them.
APART = 5.0
# Of numbers in tables, as the paper has them.
DIGITS = 2


@dataclass(frozen=True)
class CellStatus:
    """One cell and the runs that there are of it.

    Attributes:
        values: the numbers of the runs that converged.
        diverged: how many did not, be it that they stopped or that they still guess at their end.
        seeds: how many runs are wanted; there may be more of them.
        unmeasured: how many converged that nothing is measured of, since the cell has no metric.
    """

    cell: Cell
    values: tuple[float, ...]
    diverged: int
    seeds: int
    unmeasured: int = 0

    @property
    def state(self) -> str:
        """One of "quoted", "missing", "partial" and "done"."""
        if self.cell.config is None:
            return "quoted"
        found = len(self.values) + self.diverged + self.unmeasured
        return "done" if found >= self.seeds else "partial" if found else "missing"

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def deviation(self) -> float | None:
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def difference(self) -> float | None:
        """Ours without the paper's, both as tables show them; None where one of them has no number."""
        paper = self.cell.paper
        if self.mean is None or not isinstance(paper, float | int):
            return None
        # Else what is the same in a table could be worse there by -0.00; the zero takes the minus away.
        return round(round(self.mean, DIGITS) - paper, DIGITS) + 0.0

    def misses_by(self, higher_is_better: bool) -> float | None:
        """By how much it is worse than the paper; 0 where it is as good or better."""
        if self.difference is None:
            return None
        return max(0.0, -self.difference if higher_is_better else self.difference)

    def described(self, higher_is_better: bool) -> dict[str, Any]:
        """For machines."""
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
        }

    def __str__(self) -> str:
        """Ours, the paper's, and the difference."""
        ours = {"quoted": "-", "missing": "missing"}.get(self.state) or self.ours
        paper = "" if self.cell.paper is None else self._paper()
        return f"{ours} ({paper})" if paper else ours

    @property
    def ours(self) -> str:
        """The mean with its deviation, each seed where they end far apart, and how many runs were lost."""
        if self.mean is None:
            return UNMEASURED if self.unmeasured else NOT_CONVERGED
        lost = f", {self.diverged} {NOT_CONVERGED}" if self.diverged else ""
        return f"{self.mean:.2f}{self._spread()}{lost}"

    def _spread(self) -> str:
        if self.deviation is None:
            return ""
        each = f" [{' '.join(f'{value:.1f}' for value in self.values)}]" if self.deviation > APART else ""
        return f" ± {self.deviation:.2f}{each}"

    def _paper(self) -> str:
        paper = self.cell.paper
        shown = paper if isinstance(paper, str) else f"{paper:.2f}"
        return shown if self.difference is None else f"{shown}, {self.difference:+.2f}"


def status_of(experiment: Experiment, known: Known, seeds: int | None = None) -> list[CellStatus]:
    """The state of every cell, by all seeds that have a record; with `seeds`, by that many of the first."""
    found = records_of(experiment, known, seeds)
    return [_status(cell, records, seeds or experiment.seeds) for cell, records in found]


def pooled_deviation(found: Iterable[CellStatus]) -> float | None:
    """The deviation of one run, over all cells with several; None where there is none such."""
    several = [(len(one.values) - 1, one.deviation) for one in found if one.deviation is not None]
    if not several:
        return None
    return math.sqrt(sum(free * deviation**2 for free, deviation in several) / sum(free for free, _ in several))


def records_of(experiment: Experiment, known: Known, seeds: int | None = None) -> list[tuple[Cell, list[Record]]]:
    """Every cell with the records of its runs, over the same seeds as `status_of`."""
    # To tell which run a config is takes a millisecond: only seeds that some run has are looked for.
    there = [] if seeds else sorted(_known_seeds(known))
    found = []
    for cell in experiment.cells:
        configs = cell.configs(seeds) if seeds else _with_seeds(cell, there)
        found.append((cell, [record for config in configs if (record := known.record(config)) is not None]))
    return found


def _known_seeds(known: Known) -> set[int]:
    """The seeds that there is any record of, by the names of the runs."""
    names = [*known.brought, *(run.folder.name for run in all_runs(known.runs))]
    return {int(found[1]) for name in names if (found := SEED.search(name))}


def _with_seeds(cell: Cell, seeds: Sequence[int]) -> list[RunConfig]:
    """The runs of those seeds that may be the cell's."""
    if cell.config is None:
        return []
    own = range(cell.first_seed, cell.first_seed + MOST_SEEDS)
    return [dataclasses.replace(cell.config, seed=seed) for seed in seeds if seed in own]


def _status(cell: Cell, records: list[Record], seeds: int) -> CellStatus:
    done = [record for record in records if record["status"] == "done"]
    diverged = sum(record["status"] == "diverged" for record in records)
    if not cell.metric:
        return CellStatus(cell, (), diverged, seeds, unmeasured=len(done))
    learned = [record for record in done if not guesses(record)]
    values = [value for record in learned if (value := cell.value(record)) is not None]
    return CellStatus(cell, tuple(values), diverged + len(done) - len(learned), seeds)


def guesses(record: Record) -> bool:
    """Whether the network has learned nothing."""
    classes = (record.get("data") or {}).get("classes")
    error = (record.get("results") or {}).get("test_error")
    if not isinstance(classes, list) or len(classes) <= GUESSING or not isinstance(error, int | float):
        return False
    return 100 - error < GUESSING * 100 / len(classes)
