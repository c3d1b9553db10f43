"""From the names of experiments to their tables."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from dcnet.environment import available_cores
from dcnet.experiments.board import Board
from dcnet.experiments.experiment import Experiment, chosen, narrowed
from dcnet.experiments.findings import findings_of
from dcnet.experiments.known import Known
from dcnet.experiments.pool import Pool
from dcnet.experiments.smoke import in_small
from dcnet.experiments.status import CellStatus, records_of, status_of
from dcnet.experiments.tasks import Task, planned
from dcnet.experiments.worker import DIVERGED, DONE, Place
from dcnet.files import write_json
from dcnet.training import Execution
from dcnet.training.runs import runs_root

FAILED, INTERRUPTED = 1, 130
# Side by side under MPS; more of them do not make a GPU faster that is busy.
SHARED = 4


def jobs_of(text: str, device: str) -> int:
    """How many runs side by side: what is asked for, or, for "auto", what the machine is known to take well."""
    if text == "auto":
        shared = (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")) / "control").exists()
        return SHARED if device == "cuda" and shared else 1
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 64):
        raise ValueError(f"--jobs is {text!r}: give a number from 1 to 64, or auto")
    return int(text)


class Reproduction:
    """Experiments, the records that there are of them, and what has to be run."""

    def __init__(
        self,
        names: Sequence[str],
        seeds: int | None,
        smoke: bool,
        runs: Path | None,
        records: Sequence[Path],
        execution: Execution,
        jobs: int,
        only: Sequence[str] = (),
    ):
        data, wanted = execution.data_dir, narrowed(chosen(names), only)
        self.experiments = [in_small(found) if smoke else found.with_data(data) for found in wanted]
        self.seeds, self.records, self.jobs = seeds, records, jobs
        self.runs = (runs or runs_root()) / "smoke" if smoke else runs or runs_root()
        threads = max(1, available_cores() // jobs) if execution.device == "cpu" and jobs > 1 else None
        self.place = Place(self.runs, execution, threads)
        self.known()

    def known(self) -> Known:
        """The records that there are now."""
        return Known(self.runs, self.records)

    def run(self, console: Console) -> int:
        """Runs what has no record; the exit code is 1 if some run could not be carried out, 130 if interrupted."""
        tasks = planned(self.experiments, self.known(), self.seeds)
        return self._carry_out(tasks, console) if tasks else 0

    def _carry_out(self, tasks: Sequence[Task], console: Console) -> int:
        with Board(console, len(tasks)) as board:
            pool = Pool(tasks, self.place, self.jobs, board)
            finished = pool.run()
        left = sum(pool.outcomes.get(task.label) not in (DONE, DIVERGED) for task in tasks)
        if not finished and left:
            console.print(f"stopped with {left} of {len(tasks)} tasks to go; the same command goes on", highlight=False)
            return INTERRUPTED
        return 0 if set(pool.outcomes.values()) <= {DONE, DIVERGED} else FAILED

    def statuses(self) -> list[tuple[Experiment, list[CellStatus]]]:
        """The state of every cell of each experiment."""
        known = self.known()
        return [(experiment, status_of(experiment, known, self.seeds)) for experiment in self.experiments]

    def described(self) -> dict[str, Any]:
        """The same for machines."""
        return {experiment.name: _described(experiment, found) for experiment, found in self.statuses()}

    def collect(self, folder: Path) -> None:
        """Copies the record of every run of these experiments that is at its end, under the name of the run."""
        known = self.known()
        for experiment in self.experiments:
            for _, records in records_of(experiment, known, self.seeds):
                for record in records:
                    write_json(folder / f"{record['name']}-{record['hash']}.json", record)


def _described(experiment: Experiment, found: Sequence[CellStatus]) -> dict[str, Any]:
    cells = [status.described(experiment.higher_is_better) for status in found]
    told = findings_of(experiment, found)
    findings = {name: None if one is None else one.described() for name, one in told.items()}
    return {"title": experiment.title, "not_run": experiment.not_run, "cells": cells, **findings}
