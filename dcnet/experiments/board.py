"""A line for each run that is under way, and one for all of them with the time that is left."""

from typing import Any

from rich.console import Console
from rich.progress import TaskID

from dcnet.escapes import visible
from dcnet.experiments.tasks import Task
from dcnet.experiments.worker import DONE, INTERRUPTED
from dcnet.training.progress import bars, moves

LONGEST = 60


class Board:
    """Shows bars on a terminal, and elsewhere, in a log, a line for each run that begins or ends."""

    def __init__(self, console: Console, tasks: int):
        self.console, self.count, self.ended = console, tasks, 0
        self.lines: dict[str, TaskID] = {}
        self.totals: dict[str, int] = {}
        self.shares: dict[str, float] = {}
        self.progress = bars(console)
        # In shares of runs, since how long a run is shows only when it starts.
        self.all = self.progress.add_task("all runs", total=float(tasks), numbers="")

    def __enter__(self) -> "Board":
        self.progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.progress.stop()

    def begins(self, task: Task) -> None:
        name = task.label if len(task.label) <= LONGEST else f"…{task.label[-LONGEST:]}"
        self.lines[task.label] = self.progress.add_task(name, total=None, numbers="starts")
        if not moves(self.console):
            self._say(f"{task.label}: begins, {len(self.shares) + 1} of {self.count}")
        self.shares[task.label] = 0.0

    def drop(self, tasks: int) -> None:
        """So many of those that are left will not begin."""
        self.count -= tasks
        self.progress.update(self.all, total=float(self.count))

    def hears(self, task: Task, kind: str, *values: Any) -> None:
        """What a worker tells of its run."""
        line = self.lines[task.label]
        if kind == "starts":
            done, self.totals[task.label] = values
            self.progress.update(line, total=self.totals[task.label], completed=done, numbers="")
        elif kind == "steps":
            done, loss = values
            self.progress.update(line, completed=done, numbers=f"loss {loss:.3f}")
            self._share(task, done / self.totals[task.label])
        elif kind == "note":
            self.progress.update(line, numbers=values[0].split(": ")[-1][:LONGEST])

    def ends(self, task: Task, outcome: str, problem: str) -> None:
        self.ended += 1
        self.progress.remove_task(self.lines.pop(task.label))
        self._share(task, 1.0)
        if problem or outcome not in (DONE, INTERRUPTED):
            self._say(problem or f"{task.label}: {outcome}")
        elif not moves(self.console):
            self._say(f"{task.label}: {outcome}, {self.ended} of {self.count}")

    def _share(self, task: Task, share: float) -> None:
        self.shares[task.label] = share
        self.progress.update(self.all, completed=sum(self.shares.values()), numbers=f"{self.ended} done")

    def _say(self, text: str) -> None:
        # Without styles, since names may have brackets.
        self.console.print(visible(text), soft_wrap=True, highlight=False, markup=False)
