"""What is left to do: each run once, however many cells have it, with all that is wanted of its network."""

from collections.abc import Sequence
from dataclasses import dataclass

from dcnet.experiments.experiment import Experiment
from dcnet.experiments.known import Known
from dcnet.training import RunConfig


@dataclass(frozen=True)
class Task:
    """A run, and the evaluations of its network that its record lacks."""

    config: RunConfig
    evaluations: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.config.name}-{self.config.hash}"


def tasks_of(experiments: Sequence[Experiment], known: Known, seeds: int | None = None) -> list[Task]:
    """The runs that have no record, and those whose record lacks an evaluation; the first seeds of all come first."""
    wanted: dict[RunConfig, dict[str, None]] = {}
    for experiment in experiments:
        for cell in experiment.cells if experiment.not_run is None else ():
            for config in cell.configs(seeds or experiment.seeds):
                evaluations = wanted.setdefault(config, {})
                if cell.evaluation is not None:
                    evaluations[cell.evaluation] = None
    tasks = [task for config, names in wanted.items() if (task := _task(config, names, known)) is not None]
    return sorted(tasks, key=lambda task: task.config.seed)


def _task(config: RunConfig, evaluations: dict[str, None], known: Known) -> Task | None:
    record = known.record(config)
    if record is None:
        return Task(config, tuple(evaluations))
    if record["status"] == "diverged":
        return None
    missing = tuple(name for name in evaluations if name not in record.get("evaluations", {}))
    return Task(config, missing) if missing else None
