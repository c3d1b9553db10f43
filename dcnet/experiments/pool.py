"""Runs tasks in parallel in worker processes; if a worker dies, only its current task fails."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.resource_tracker import ensure_running
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import TaskID

from dcnet.environment import choose_device
from dcnet.experiments.experiment import evaluations
from dcnet.experiments.status import Task
from dcnet.files import sentence_of
from dcnet.interrupts import Interruption, interruptible
from dcnet.terminal import print_line
from dcnet.training import Callback, DivergenceError, Execution, Run, Trainer, load_model
from dcnet.training.runs import add_evaluation, run_lock
from dcnet.training.session import can_redraw, progress_bar

DONE, DIVERGED, INTERRUPTED, FAILED = "done", "diverged", "interrupted", "failed"
# Minimum seconds between two messages about steps.
MESSAGE_INTERVAL = 0.2
# Seconds between two checks for an interruption.
POLL_INTERVAL = 0.2
# Seconds that a process has to exit before it is killed.
EXIT_TIMEOUT = 30.0
# The largest number of characters of a name or a note next to a progress bar.
MAX_NAME = 60


@dataclass(frozen=True)
class WorkerSettings:
    """Where and how workers run tasks; `threads` is the number of CPU threads per worker, None for torch's default."""

    runs: Path
    execution: Execution
    threads: int | None = None


class PipeCallback(Callback):
    """Sends the progress of a run through a pipe."""

    def __init__(self, pipe: Connection):
        self.pipe, self.sent_at = pipe, 0.0

    def on_start(self, name: str, done: int, total: int) -> None:
        self.pipe.send(("starts", done, total))

    def on_step(self, done: int, loss: float, accuracy: float, images_per_second: float) -> None:
        if time.monotonic() - self.sent_at >= MESSAGE_INTERVAL:
            self.sent_at = time.monotonic()
            self.pipe.send(("steps", done, loss))

    def on_message(self, text: str) -> None:
        self.pipe.send(("note", text))


def run_worker(pipe: Connection, settings: WorkerSettings) -> None:
    """Runs tasks from the pipe until it receives None."""
    # Leave the process group, so that Ctrl-C reaches only the pool, which then sends SIGTERM once.
    os.setpgrp()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    while (task := pipe.recv()) is not None:
        pipe.send(("ended", *run_task(task, settings, PipeCallback(pipe))))


def run_task(task: Task, settings: WorkerSettings, callback: Callback) -> tuple[str, str]:
    """Runs the task; returns its outcome, and one sentence about a problem, or ''."""
    try:
        return _train_and_evaluate(task, settings, callback), ""
    except DivergenceError as error:
        return DIVERGED, str(error)
    except BrokenPipeError:
        raise
    except Exception as error:  # One failed task must not stop the others.
        kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
        return FAILED, f"{task.name}: {kind}{sentence_of(error)}"


def _train_and_evaluate(task: Task, settings: WorkerSettings, callback: Callback) -> str:
    run = Run.of(task.config, settings.runs)
    with run_lock(run.folder):
        if run.finished_record(task.config) is None:
            record = Trainer(task.config, run, settings.execution, callback).run()
            if record.status != DONE:
                return INTERRUPTED
        run.remove_training_files()
        for name in (*task.at_end, *task.evaluations):
            if name not in run.record().evaluations:
                callback.on_message(f"{task.name}: {name}")
                add_evaluation(run, name, _evaluate(name, run, settings.execution))
    return DONE


def _evaluate(name: str, run: Run, execution: Execution) -> dict[str, Any]:
    """Runs the evaluation of this name on the network of a run."""
    evaluate = evaluations[name]
    model, record = load_model(run)
    return evaluate(model.to(choose_device(execution.device)), record, run.folder.parent, execution.data_dir)


class ProgressBoard:
    """Shows the progress of all tasks: bars on a terminal; in a log, one line for each start and end."""

    def __init__(self, console: Console, tasks: int):
        self.console, self.count, self.ended = console, tasks, 0
        self.lines: dict[str, TaskID] = {}
        self.totals: dict[str, int] = {}
        self.fractions: dict[str, float] = {}
        self.progress = progress_bar(console)
        # Counted in fractions of tasks, since the length of a run is known only when it starts.
        self.all = self.progress.add_task("all runs", total=float(tasks), numbers="")

    def __enter__(self) -> "ProgressBoard":
        self.progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.progress.stop()

    def start(self, task: Task) -> None:
        name = task.label if len(task.label) <= MAX_NAME else f"…{task.label[-MAX_NAME:]}"
        self.lines[task.label] = self.progress.add_task(name, total=None, numbers="starts")
        if not can_redraw(self.console):
            print_line(self.console, f"{task.label}: starts, {len(self.fractions) + 1} of {self.count}")
        self.fractions[task.label] = 0.0

    def drop(self, tasks: int) -> None:
        """Subtracts tasks that will not start from the total."""
        self.count -= tasks
        self.progress.update(self.all, total=float(self.count))

    def update(self, task: Task, kind: str, *values: Any) -> None:
        """Shows a message of a `PipeCallback`."""
        line = self.lines[task.label]
        if kind == "starts":
            done, self.totals[task.label] = values
            self.progress.update(line, total=self.totals[task.label], completed=done, numbers="")
        elif kind == "steps":
            done, loss = values
            self.progress.update(line, completed=done, numbers=f"loss {loss:.3f}")
            self._set_fraction(task, done / self.totals[task.label])
        elif kind == "note":
            self.progress.update(line, numbers=values[0].split(": ")[-1][:MAX_NAME])

    def end(self, task: Task, outcome: str, problem: str) -> None:
        self.ended += 1
        self.progress.remove_task(self.lines.pop(task.label))
        self._set_fraction(task, 1.0)
        if problem or outcome not in (DONE, INTERRUPTED):
            print_line(self.console, problem or f"{task.label}: {outcome}")
        elif not can_redraw(self.console):
            print_line(self.console, f"{task.label}: {outcome}, {self.ended} of {self.count}")

    def _set_fraction(self, task: Task, fraction: float) -> None:
        self.fractions[task.label] = fraction
        self.progress.update(self.all, completed=sum(self.fractions.values()), numbers=f"{self.ended} done")


# Starts a worker; returns a process, with the interface of multiprocessing.Process, and our end of its pipe.
Spawn = Callable[[WorkerSettings], tuple[Any, Connection]]


def spawn_worker(settings: WorkerSettings) -> tuple[Any, Connection]:
    context = multiprocessing.get_context("spawn")
    own, others = context.Pipe()
    process = context.Process(target=run_worker, args=(others, settings), daemon=False)
    with _blocking_ctrl_c():
        process.start()
    others.close()
    return process, own


@contextmanager
def _blocking_ctrl_c() -> Iterator[None]:
    """Blocks Ctrl-C for processes started in this context, since it would end them while they import torch.

    This process receives a pending Ctrl-C on exit.
    """
    # Python would start the resource tracker with the first worker, and unblock Ctrl-C.
    ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass
class Worker:
    """A worker process and its current task; `stopping` is True once it was sent SIGTERM."""

    process: Any
    pipe: Connection
    task: Task
    stopping: bool = False

    def stop(self) -> None:
        if not self.stopping and self.process.pid is not None:
            self.stopping = True
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGTERM)

    def join(self) -> None:
        """Waits until the process exits; kills it after a timeout."""
        self.process.join(EXIT_TIMEOUT)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class Pool:
    """Distributes tasks over worker processes; `outcomes` has the outcome of each ended task by its label."""

    def __init__(
        self,
        tasks: Sequence[Task],
        settings: WorkerSettings,
        jobs: int,
        board: ProgressBoard,
        spawn: Spawn = spawn_worker,
    ):
        self.pending, self.settings, self.board, self.spawn = list(tasks), settings, board, spawn
        self.jobs = max(1, min(jobs, len(tasks)))
        self.outcomes: dict[str, str] = {}
        self.workers: list[Worker] = []

    def run(self) -> bool:
        """Runs all tasks; returns False if interrupted."""
        with interruptible() as interruption:
            try:
                self._start_workers()
                while self.workers:
                    self._receive(interruption)
            finally:
                for worker in self.workers:
                    worker.process.kill()
        return not interruption.requested

    def _next_task(self) -> Task | None:
        """Removes and returns the first task that can start; drops evaluations of runs that failed."""
        kept = [task for task in self.pending if self.outcomes.get(task.name, DONE) == DONE]
        self.board.drop(len(self.pending) - len(kept))
        self.pending = kept
        tasks = [*self.pending, *(worker.task for worker in self.workers)]
        unfinished = {task.name for task in tasks if not task.evaluations}
        ready = next((task for task in self.pending if not task.after & unfinished), None)
        if ready is not None:
            self.pending.remove(ready)
        return ready

    def _start_workers(self) -> None:
        while len(self.workers) < self.jobs and (task := self._next_task()) is not None:
            self._assign(Worker(*self.spawn(self.settings), task), task)

    def _assign(self, worker: Worker, task: Task) -> None:
        worker.task = task
        self.workers.append(worker)
        self.board.start(task)
        # `_receive` handles a process that has died.
        with suppress(BrokenPipeError):
            worker.pipe.send(task)

    def _receive(self, interruption: Interruption) -> None:
        ready = wait([worker.pipe for worker in self.workers], POLL_INTERVAL)
        for worker in [worker for worker in self.workers if worker.pipe in ready]:
            self._handle_message(worker, interruption.requested)
        if interruption.requested:
            for worker in self.workers:
                worker.stop()

    def _handle_message(self, worker: Worker, interrupted: bool) -> None:
        try:
            kind, *values = worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._handle_exit(worker)
        else:
            if kind != "ended":
                self.board.update(worker.task, kind, *values)
                return
            self._finish(worker, *values)
            if interrupted or (task := self._next_task()) is None:
                with suppress(BrokenPipeError):
                    worker.pipe.send(None)
                worker.join()
            else:
                self._assign(worker, task)
        if not interrupted:
            # Several tasks may become ready when one ends.
            self._start_workers()

    def _handle_exit(self, worker: Worker) -> None:
        """Ends the task of a process that exited during it: the process was stopped by us, or it died."""
        worker.join()
        code = worker.process.exitcode
        problem = f"{worker.task.name}: its process died (exit code {code}); run the same command again to resume"
        self._finish(worker, *((INTERRUPTED, "") if worker.stopping else (FAILED, problem)))

    def _finish(self, worker: Worker, outcome: str, problem: str) -> None:
        self.outcomes[worker.task.label] = outcome
        self.board.end(worker.task, outcome, problem)
        self.workers.remove(worker)
