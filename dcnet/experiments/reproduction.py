"""Reproduces experiments by name: missing runs, tables, and smoke tests."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from dcnet.environment import available_cores
from dcnet.exit_codes import FAILED, INTERRUPTED
from dcnet.experiments.experiment import Cell, Experiment, select_cells, select_experiments
from dcnet.experiments.findings import FINDINGS, findings_of
from dcnet.experiments.pool import DIVERGED, DONE, Pool, ProgressBoard, WorkerSettings
from dcnet.experiments.status import CellStatus, RecordIndex, Task, cell_records, plan_tasks, status_of
from dcnet.training import Execution, RunConfig
from dcnet.training.record import write_record
from dcnet.training.runs import runs_root

# The networks of smoke tests, and their training.
SMOKE_WIDTH, SMOKE_STEPS, SMOKE_IMAGES, SMOKE_SIZES = 0.05, 2, 60, "4:0.5"
# Evaluations that need data other than the digits, or take too long for a smoke test.
NOT_IN_SMOKE_TESTS = ("faces", "open-set", "attacks-today", "attack-choice", "top-5")
SMOKE_NOTE = "A smoke test on the digits: it checks that everything runs; the numbers are meaningless."


def smoke_test(experiment: Experiment) -> Experiment:
    """Returns the experiment with tiny runs of a second each; their numbers are meaningless."""
    rules = None if experiment.rules is None else experiment.rules.small(_smoke_config)
    cells = experiment.cells if rules is None else rules.cells(lambda config: None)
    return dataclasses.replace(
        experiment,
        title=f"{experiment.title} (smoke test)",
        cells=tuple(_smoke_cell(cell) for cell in cells),
        rules=rules,
        seeds=1,
        contest=False,
        collapses=False,
        not_run=None,
        notes=(SMOKE_NOTE,),
    )


def _smoke_cell(cell: Cell) -> Cell:
    if cell.config is None:
        return cell
    # The paper's number and the target do not apply to the digits.
    small = dataclasses.replace(cell, config=_smoke_config(cell.config), paper=None, target=None)
    if cell.evaluation not in NOT_IN_SMOKE_TESTS:
        return small
    # The network is trained, but not evaluated.
    return dataclasses.replace(small, evaluation=None, metric=())


def _smoke_config(config: RunConfig) -> RunConfig:
    return dataclasses.replace(
        config,
        dataset="digits",
        width=SMOKE_WIDTH,
        steps=SMOKE_STEPS,
        epochs=None,
        batch_size=SMOKE_IMAGES // 2,
        train_images=SMOKE_IMAGES,
        image_size=None,
        progressive_sizes=config.progressive_sizes and SMOKE_SIZES,
        evaluate_every=SMOKE_STEPS,
        precision="float32",
        pixel_mean=(0.0,),
        pixel_std=(1.0,),
    )


RESUME = "run the same command again to resume"
# Parallel runs on a GPU shared by MPS (NVIDIA's Multi-Process Service); more would not be faster.
MPS_JOBS = 4


def parse_jobs(text: str, device: str) -> int:
    """Returns the number of parallel runs from --jobs; "auto" is 1, or MPS_JOBS on a GPU shared by MPS."""
    if text == "auto":
        shared = (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")) / "control").exists()
        return MPS_JOBS if device == "cuda" and shared else 1
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 64):
        raise ValueError(f"--jobs must be a number from 1 to 64 or auto, not {text!r}")
    return int(text)


class Reproduction:
    """Runs what is missing of some experiments, and reads their results from records.

    Args:
        names: names of experiments, or "all", which trains all but contests.
        seeds: number of runs per cell; None for the default of each experiment.
        smoke: run smoke tests instead.
        runs: the folder of all runs; None for `runs_root()`.
        records: folders with records from other machines.
        execution: where and how to compute.
        jobs: number of runs in parallel.
        only: prefixes that select cells, see `Experiment.only`.
    """

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
        data, wanted = execution.data_dir, select_cells(select_experiments(names), only)
        self.wanted = [smoke_test(one) if smoke else one.with_data(data) for one in wanted]
        # Contests take days, so they must be named.
        named = {one.name for one in select_experiments(name for name in names if name != "all")}
        self.left_out = {one.name for one in self.wanted if one.rules is not None and not smoke} - named
        self.seeds, self.records, self.jobs = seeds, records, jobs
        self.runs = (runs or runs_root()) / "smoke" if smoke else runs or runs_root()
        threads = max(1, available_cores() // jobs) if execution.device == "cpu" and jobs > 1 else None
        self.settings = WorkerSettings(self.runs, execution, threads)
        # Raises ValueError now if a folder of records does not exist.
        self.index()

    def index(self) -> RecordIndex:
        """Reads the current records."""
        return RecordIndex(self.runs, self.records)

    def experiments(self, index: RecordIndex) -> list[Experiment]:
        """Returns the experiments with the cells that follow from the records."""
        return [experiment.at(index.record) for experiment in self.wanted]

    def run(self, console: Console) -> int:
        """Runs everything that has no record yet; returns the exit code: 1 if a run failed, 130 if interrupted."""
        before: list[Task] = []
        # When all tasks of a stage are done, those of the next stage are known.
        while (tasks := self._missing_tasks()) and tasks != before:
            if code := self._run_tasks(tasks, console):
                return code
            before = tasks
        return 0

    def _missing_tasks(self) -> list[Task]:
        index = self.index()
        asked = [experiment for experiment in self.experiments(index) if experiment.name not in self.left_out]
        return plan_tasks(asked, index, self.seeds)

    def _run_tasks(self, tasks: Sequence[Task], console: Console) -> int:
        with ProgressBoard(console, len(tasks)) as board:
            pool = Pool(tasks, self.settings, self.jobs, board)
            finished = pool.run()
        left = sum(pool.outcomes.get(task.label) not in (DONE, DIVERGED) for task in tasks)
        if not finished and left:
            console.print(f"interrupted with {left} of {len(tasks)} tasks left; {RESUME}", highlight=False)
            return INTERRUPTED
        return 0 if set(pool.outcomes.values()) <= {DONE, DIVERGED} else FAILED

    def statuses(self) -> list[tuple[Experiment, list[CellStatus]]]:
        """Returns each experiment with the status of its cells."""
        index = self.index()
        return [(experiment, status_of(experiment, index, self.seeds)) for experiment in self.experiments(index)]

    def to_json(self) -> dict[str, Any]:
        """Returns the status of the cells and the findings of each experiment as JSON values."""
        return {experiment.name: _to_json(experiment, statuses) for experiment, statuses in self.statuses()}

    def collect(self, folder: Path) -> None:
        """Copies the records of all finished runs of these experiments to a folder, each named after its run."""
        index = self.index()
        for experiment in self.experiments(index):
            for _, records in cell_records(experiment, index, self.seeds):
                for record in records:
                    write_record(folder / f"{record.run_name}.json", record)


def _to_json(experiment: Experiment, statuses: Sequence[CellStatus]) -> dict[str, Any]:
    known = findings_of(experiment, statuses)
    return {
        "title": experiment.title,
        "not_run": experiment.not_run,
        "cells": [status.to_json(experiment.higher_is_better) for status in statuses],
        **{name: known[name].to_json() if name in known else None for name in FINDINGS},
    }
