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


def trainings(experiments: Sequence[Experiment], known: Known, seeds: int | None = None) -> list[Task]:
    """The runs that have no record; the first seeds of all come first."""
    missing = [Task(config) for config in _wanted(experiments, seeds) if known.record(config) is None]
    return sorted(missing, key=lambda task: task.config.seed)


def evaluations(experiments: Sequence[Experiment], known: Known, seeds: int | None = None) -> list[Task]:
    """The runs whose record lacks an evaluation, which may need other runs, so that these come first."""
    tasks = []
    for config, names in _wanted(experiments, seeds).items():
        record = known.record(config)
        if record is not None and record["status"] == "done":
            missing = tuple(name for name in names if name not in record.get("evaluations", {}))
            tasks += [Task(config, missing)] if missing else []
    return sorted(tasks, key=lambda task: task.config.seed)


def _wanted(experiments: Sequence[Experiment], seeds: int | None) -> dict[RunConfig, list[str]]:
    """Every run once, with the evaluations that cells want of it."""
    wanted: dict[RunConfig, list[str]] = {}
    for experiment in experiments:
        for cell in experiment.cells if experiment.not_run is None else ():
            for config in cell.configs(seeds or experiment.seeds):
                names = wanted.setdefault(config, [])
                if cell.evaluation is not None and cell.evaluation not in names:
                    names.append(cell.evaluation)
    return wanted
