"""A process that carries out one task after the other, and tells how it goes."""

import os
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from dcnet.experiments.evaluations import carry_out
from dcnet.experiments.tasks import Task
from dcnet.files import sentence_of
from dcnet.training import DivergenceError, Execution, Run, Trainer, Watcher
from dcnet.training.identity import check_is_of
from dcnet.training.lock import locked
from dcnet.training.records import add_evaluation

# Seconds from one message about steps to the next.
SELDOM = 0.2
DONE, DIVERGED, INTERRUPTED, FAILED = "done", "diverged", "interrupted", "failed"


@dataclass(frozen=True)
class Place:
    """Where the work is done: in the folder of runs, as the execution says, with so many threads of the CPU."""

    runs: Path
    execution: Execution
    threads: int | None = None


class Teller(Watcher):
    """Tells the process at the other end of the pipe how a run goes."""

    def __init__(self, pipe: Connection):
        self.pipe, self.told = pipe, 0.0

    def starts(self, name: str, done: int, total: int) -> None:
        self.pipe.send(("starts", done, total))

    def steps(self, done: int, loss: float, accuracy: float, images_per_second: float) -> None:
        if time.monotonic() - self.told >= SELDOM:
            self.told = time.monotonic()
            self.pipe.send(("steps", done, loss))

    def note(self, text: str) -> None:
        self.pipe.send(("note", text))


def work(pipe: Connection, place: Place) -> None:
    """Takes tasks from the pipe until there is None."""
    # Ctrl-C is for the process that shares out the tasks, which tells this one once, by a signal that must be heard.
    os.setpgrp()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if place.threads is not None:
        torch.set_num_threads(place.threads)
    while (task := pipe.recv()) is not None:
        pipe.send(("ended", *attempt(task, place, Teller(pipe))))


def attempt(task: Task, place: Place, watcher: Watcher) -> tuple[str, str]:
    """How the task ended, and a sentence about it if it did not end well."""
    try:
        return _carry_out(task, place, watcher), ""
    except DivergenceError as error:
        return DIVERGED, str(error)
    except BrokenPipeError:
        raise
    except Exception as error:  # One task of many must not take the others with it.
        kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
        return FAILED, f"{task.name}: {kind}{sentence_of(error)}"


def _carry_out(task: Task, place: Place, watcher: Watcher) -> str:
    run = Run.of(task.config, place.runs)
    with locked(run.folder):
        if (known := run.record_if_any()) is not None:
            check_is_of(known, task.config, run.folder)
        if not run.done:
            record = Trainer(task.config, run, place.execution, watcher).run()
            if record["status"] != DONE:
                return INTERRUPTED
        run.put_away()
        for name in task.evaluations:
            if name not in run.record().get("evaluations", {}):
                watcher.note(f"{task.name}: {name}")
                add_evaluation(run, name, carry_out(name, run, place.execution.data_dir, _device(place)))
    return DONE


def _device(place: Place) -> torch.device:
    asked = place.execution.device
    return torch.device("cuda" if asked == "auto" and torch.cuda.is_available() else asked.replace("auto", "cpu"))
