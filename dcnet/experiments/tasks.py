"""What is left to do: each run once, however many cells have it, and then what is wanted of its network."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dcnet.experiments.experiment import Experiment
from dcnet.experiments.known import Known
from dcnet.training import RunConfig


@dataclass(frozen=True)
class Task:
    """A run, or the evaluations of its network that its record lacks.

    Attributes:
        after: the names of runs that have to be at their end before, since an evaluation may need other networks.
    """

    config: RunConfig
    evaluations: tuple[str, ...] = ()
    after: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """Of the run."""
        return f"{self.config.name}-{self.config.hash}"

    @property
    def label(self) -> str:
        """Of the task."""
        return f"{self.name}: {', '.join(self.evaluations)}" if self.evaluations else self.name


@dataclass
class Wanted:
    """What cells want of a run: evaluations, and the least number that its seed has among those of a cell."""

    turn: int
    evaluations: list[str]


def planned(experiments: Sequence[Experiment], known: Known, seeds: int | None = None) -> list[Task]:
    """The runs that have no record, and the evaluations that records lack: all of the first seeds, then the next."""
    wanted = _wanted(experiments, seeds)
    tasks: list[Task] = []
    for turn in sorted({found.turn for found in wanted.values()}):
        own = {config: found.evaluations for config, found in wanted.items() if found.turn == turn}
        trainings = [Task(config) for config in own if known.record(config) is None]
        before = frozenset(task.name for task in trainings)
        tasks += [*trainings, *(task for config in own for task in _evaluations(config, own[config], known, before))]
    return tasks


def _evaluations(config: RunConfig, names: Iterable[str], known: Known, before: frozenset[str]) -> list[Task]:
    """What the record lacks; nothing of a network that did not converge."""
    record = known.record(config) or {}
    missing = tuple(name for name in names if name not in record.get("evaluations", {}))
    return [Task(config, missing, before)] if missing and record.get("status", "done") == "done" else []


def _wanted(experiments: Sequence[Experiment], seeds: int | None) -> dict[RunConfig, Wanted]:
    """Every run once."""
    wanted: dict[RunConfig, Wanted] = {}
    for experiment in experiments:
        for cell in experiment.cells if experiment.not_run is None else ():
            for turn, config in enumerate(cell.configs(seeds or experiment.seeds)):
                found = wanted.setdefault(config, Wanted(turn, []))
                found.turn = min(found.turn, turn)
                if cell.evaluation is not None and cell.evaluation not in found.evaluations:
                    found.evaluations.append(cell.evaluation)
    return wanted
