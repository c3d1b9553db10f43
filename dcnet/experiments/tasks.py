"""The remaining tasks: each training once, even if several cells share it, then the evaluations of its network."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dcnet.experiments.experiment import Experiment
from dcnet.experiments.status import RecordIndex
from dcnet.registry import Registry
from dcnet.training import Record, Run, RunConfig, load_model


@dataclass(frozen=True)
class Task:
    """A training, or the evaluations of a network that its record lacks.

    Attributes:
        after: names of runs that must be done first, since an evaluation may need other networks.
    """

    config: RunConfig
    evaluations: tuple[str, ...] = ()
    after: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """The name of the run."""
        return f"{self.config.name}-{self.config.hash}"

    @property
    def label(self) -> str:
        return f"{self.name}: {', '.join(self.evaluations)}" if self.evaluations else self.name


def plan_tasks(experiments: Sequence[Experiment], index: RecordIndex, seeds: int | None = None) -> list[Task]:
    """The runs without a record, and the evaluations that records lack: everything of the first seed, then the next."""
    tasks: list[Task] = []
    for runs in _runs_by_seed(experiments, seeds):
        trainings = [Task(config) for config in runs if index.record(config) is None]
        before = frozenset(task.name for task in trainings)
        tasks += trainings
        tasks += [task for config in runs for task in _missing_evaluations(config, runs[config], index, before)]
    return tasks


def _missing_evaluations(
    config: RunConfig, names: Iterable[str], index: RecordIndex, before: frozenset[str]
) -> list[Task]:
    """None for a network that did not converge."""
    record = index.record(config) or Record(status="done")
    missing = tuple(name for name in names if name not in record.evaluations)
    return [Task(config, missing, before)] if missing and record.status == "done" else []


def _runs_by_seed(experiments: Sequence[Experiment], seeds: int | None) -> list[dict[RunConfig, list[str]]]:
    """The evaluations of every run, each run once, by the earliest place of its seed among those of a cell."""
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


# Of the trained network in evaluation mode on its device, the record of its run, the folder of runs, and that of data.
Evaluate = Callable[[nn.Module, Record, Path, Path | None], dict[str, Any]]

evaluations: Registry[Evaluate] = Registry("an evaluation", discover="dcnet.experiments.catalogue")


def register(name: str) -> Callable[[Evaluate], Evaluate]:
    """A decorator that registers an evaluation."""
    return lambda evaluate: evaluations.add(name, evaluate, module=evaluate.__module__)


def evaluate_run(name: str, run: Run, data_dir: Path | None, device: torch.device) -> dict[str, Any]:
    """The evaluation of that name for the network of a run."""
    evaluate = evaluations[name]
    model, record = load_model(run)
    return evaluate(model.to(device), record, run.folder.parent, data_dir)
