"""How far a report card has come, on stderr."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import progress

from dcnet.escapes import visible
from dcnet.report.listing import console


class Progress:
    """A bar on a terminal, and elsewhere, as in a log, a line for each measurement."""

    def __init__(self, done: Mapping[str, Any]):
        from dcnet.robustness.measurements import measurements

        self.console, self.total = console(stderr=True), len(measurements)
        self.known = sum("skipped" not in found for found in done.values())
        columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=None),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
        )
        self.bar = progress.Progress(
            *columns, console=self.console, transient=True, disable=not self.console.is_terminal
        )
        self.task = self.bar.add_task("attack", total=self.total, completed=self.known)

    def __enter__(self) -> Progress:
        self.bar.start()
        if self.known:
            self._say(f"{self.known} of {self.total} measurements are in the record already, and are not made again")
        return self

    def __exit__(self, *_: Any) -> None:
        self.bar.stop()

    def begins(self, name: str) -> None:
        self.bar.update(self.task, description=_words(name))

    def ends(self, name: str, found: Mapping[str, Any]) -> None:
        self.bar.advance(self.task)
        # A certificate has both, and is about the images that are certified.
        share = found.get("certified", found.get("accuracy"))
        told = "done" if share is None else f"{100 * share:.2f} %"
        self._say(f"{_words(name)}: {found.get('skipped', told)} ({found['seconds']:.1f} s)")

    def _say(self, text: str) -> None:
        self.console.print(visible(text), soft_wrap=True, highlight=False, markup=False)


def _words(name: str) -> str:
    return name.replace("_", " ")
