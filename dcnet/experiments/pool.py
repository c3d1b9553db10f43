"""Several tasks side by side, each in a process; whoever dies takes only its own task with it."""

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.resource_tracker import ensure_running
from typing import Any

from dcnet.experiments.board import Board
from dcnet.experiments.tasks import Task
from dcnet.experiments.worker import DONE, FAILED, INTERRUPTED, Place, work
from dcnet.training.interruption import Interruption, interruptible

PATIENCE = 0.2
# Seconds for a process to end that is told to.
LEAVING = 30.0


@dataclass
class Worker:
    """A process and what it is working on."""

    process: Any
    pipe: Connection
    task: Task
    told: bool = False


class Pool:
    """Shares out tasks among processes, and keeps a board of how they go.

    `outcomes` has how each task ended, by its label; those that were not begun have none.
    """

    def __init__(self, tasks: Sequence[Task], place: Place, jobs: int, board: Board):
        self.left, self.place, self.board = list(tasks), place, board
        self.jobs = max(1, min(jobs, len(tasks)))
        self.outcomes: dict[str, str] = {}
        self.workers: list[Worker] = []

    def run(self) -> bool:
        """Carries out all tasks; whether nobody asked to stop."""
        with interruptible() as interruption:
            try:
                self._hire()
                while self.workers:
                    self._listen(interruption)
            finally:
                for worker in self.workers:
                    worker.process.kill()
        return not interruption.asked

    def _next(self) -> Task | None:
        """The first task that can begin now; those whose run came to nothing are no longer asked for."""
        kept = [task for task in self.left if self.outcomes.get(task.name, DONE) == DONE]
        self.board.drop(len(self.left) - len(kept))
        self.left = kept
        tasks = [*self.left, *(worker.task for worker in self.workers)]
        unfinished = {task.name for task in tasks if not task.evaluations}
        ready = next((task for task in self.left if not task.after & unfinished), None)
        if ready is not None:
            self.left.remove(ready)
        return ready

    def _hire(self) -> None:
        """As many workers as there are jobs for."""
        while len(self.workers) < self.jobs and (task := self._next()) is not None:
            self._start(task)

    def _start(self, task: Task) -> None:
        context = multiprocessing.get_context("spawn")
        own, others = context.Pipe()
        process = context.Process(target=work, args=(others, self.place), daemon=False)
        with _deaf_to_ctrl_c():
            process.start()
        others.close()
        self._give(Worker(process, own, task), task)

    def _give(self, worker: Worker, task: Task) -> None:
        worker.task = task
        self.workers.append(worker)
        self.board.begins(task)
        # Of a process that is gone already the pipe tells, too, when it is listened to.
        with suppress(BrokenPipeError):
            worker.pipe.send(task)

    def _listen(self, interruption: Interruption) -> None:
        heard = wait([worker.pipe for worker in self.workers], PATIENCE)
        for worker in [worker for worker in self.workers if worker.pipe in heard]:
            self._hear(worker, interruption.asked)
        if interruption.asked:
            for worker in self.workers:
                self._tell_to_stop(worker)

    def _hear(self, worker: Worker, stopping: bool) -> None:
        try:
            kind, *values = worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._lost(worker, stopping)
            return
        if kind == "ended":
            self._ended(worker, stopping, *values)
        else:
            self.board.hears(worker.task, kind, *values)

    def _ended(self, worker: Worker, stopping: bool, outcome: str, problem: str) -> None:
        self.outcomes[worker.task.label] = outcome
        self.board.ends(worker.task, outcome, problem)
        self.workers.remove(worker)
        if stopping or (task := self._next()) is None:
            self._dismiss(worker)
        else:
            self._give(worker, task)
        if not stopping:
            # What waited for this one, beside the one that this worker takes.
            self._hire()

    def _dismiss(self, worker: Worker) -> None:
        with suppress(BrokenPipeError):
            worker.pipe.send(None)
        _join(worker.process)

    def _lost(self, worker: Worker, stopping: bool) -> None:
        """A process that ended without a word: it was told to, or was killed."""
        _join(worker.process)
        self.workers.remove(worker)
        outcome = INTERRUPTED if worker.told else FAILED
        code = worker.process.exitcode
        problem = "" if worker.told else f"{worker.task.name}: its process ended with {code}; the same command goes on"
        self.outcomes[worker.task.label] = outcome
        self.board.ends(worker.task, outcome, problem)
        if not stopping:
            self._hire()

    def _tell_to_stop(self, worker: Worker) -> None:
        if not worker.told and worker.process.pid is not None:
            worker.told = True
            with suppress(ProcessLookupError):
                os.kill(worker.process.pid, signal.SIGTERM)


def _join(process: Any) -> None:
    """Waits for a process that has nothing more to do; one that hangs while Python shuts down is killed."""
    process.join(LEAVING)
    if process.is_alive():
        process.kill()
        process.join()


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """A process that is started inside never hears Ctrl-C: it would die of it as long as it imports torch.

    What comes meanwhile is heard here afterwards.
    """
    # Python starts a process of its own with the first one, and would let Ctrl-C through again.
    ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
