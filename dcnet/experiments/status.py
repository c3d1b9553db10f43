"""What is there of an experiment, what is missing, and what misses the paper by how much."""

import statistics
from dataclasses import dataclass
from typing import Any

from dcnet.experiments.experiment import NOT_CONVERGED, Cell, Experiment, Record
from dcnet.experiments.known import Known


@dataclass(frozen=True)
class CellStatus:
    """One cell and the runs that there are of it.

    Attributes:
        values: the numbers of the runs that converged.
        diverged: how many did not.
        seeds: how many runs are wanted.
    """

    cell: Cell
    values: tuple[float, ...]
    diverged: int
    seeds: int

    @property
    def state(self) -> str:
        """One of "quoted", "missing", "partial" and "done"."""
        if self.cell.config is None:
            return "quoted"
        found = len(self.values) + self.diverged
        return "done" if found >= self.seeds else "partial" if found else "missing"

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def deviation(self) -> float | None:
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def difference(self) -> float | None:
        """Ours without the paper's; None where one of them has no number."""
        paper = self.cell.paper
        return None if self.mean is None or not isinstance(paper, float | int) else self.mean - paper

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
            "mean": self.mean,
            "deviation": self.deviation,
            "paper": self.cell.paper,
            "difference": self.difference,
            "misses_by": self.misses_by(higher_is_better),
        }

    def __str__(self) -> str:
        """Ours, the paper's, and the difference."""
        ours = {"quoted": "-", "missing": "missing"}.get(self.state) or self._ours()
        paper = "" if self.cell.paper is None else self._paper()
        return f"{ours} ({paper})" if paper else ours

    def _ours(self) -> str:
        if self.mean is None:
            return NOT_CONVERGED
        spread = "" if self.deviation is None else f" ± {self.deviation:.2f}"
        lost = f", {self.diverged} {NOT_CONVERGED}" if self.diverged else ""
        return f"{self.mean:.2f}{spread}{lost}"

    def _paper(self) -> str:
        paper = self.cell.paper
        shown = paper if isinstance(paper, str) else f"{paper:.2f}"
        return shown if self.difference is None else f"{shown}, {self.difference:+.2f}"


def status_of(experiment: Experiment, known: Known, seeds: int | None = None) -> list[CellStatus]:
    """The state of every cell."""
    wanted = seeds or experiment.seeds
    return [_status(cell, known, wanted) for cell in experiment.cells]


def _status(cell: Cell, known: Known, seeds: int) -> CellStatus:
    records = [record for config in cell.configs(seeds) if (record := known.record(config)) is not None]
    values = [value for record in records if (value := _value(cell, record)) is not None]
    diverged = sum(record["status"] == "diverged" for record in records)
    return CellStatus(cell, tuple(values), diverged, seeds)


def _value(cell: Cell, record: Record) -> float | None:
    return cell.value(record) if record["status"] == "done" else None
