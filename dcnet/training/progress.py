"""A run as a line that moves: loss, accuracy, images per second and the time that is left."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from dcnet.escapes import visible
from dcnet.training.watching import Point, Watcher

# Below, a name and all numbers would leave no room for the bar, the steps and the time.
NARROW, SHORT_NAME = 110, 20


def bars(console: Console) -> Progress:
    """Lines that move on a terminal, each with a name, a bar, steps, `numbers` and the time that is left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


class Shown(Watcher):
    """Shows a bar on a terminal, and elsewhere, in a log, the name and a line for each evaluation."""

    def __init__(self, console: Console):
        self.console, self.task = console, TaskID(0)
        self.tested, self.narrow = "", console.width < NARROW
        self.progress = bars(console)

    def __enter__(self) -> "Shown":
        self.progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.progress.stop()

    def starts(self, name: str, done: int, total: int) -> None:
        self.tested = ""
        shown = f"…{name[-SHORT_NAME:]}" if self.narrow and len(name) > SHORT_NAME else name
        self.task = self.progress.add_task(shown, total=total, completed=done, numbers="")
        if done:
            self.note(f"{name}: goes on after step {done} of {total}")
        elif not self.console.is_terminal:
            self.note(name)

    def steps(self, done: int, loss: float, accuracy: float, images_per_second: float) -> None:
        numbers = f"loss {loss:.3f}{self.tested}"
        if not self.narrow:
            numbers = f"loss {loss:.3f}  train {accuracy:.1f} %{self.tested}  {images_per_second:,.0f} images/s"
        self.progress.update(self.task, completed=done, numbers=numbers)

    def evaluated(self, point: Point) -> None:
        self.tested = f"  test {point['test_accuracy']:.2f} %"
        if not self.console.is_terminal:
            self.note(
                f"step {point['step']:.0f}, epoch {point['epoch']:.1f}: loss {point['train_loss']:.4f}, "
                f"train {point['train_accuracy']:.2f} %, test {point['test_accuracy']:.2f} %, {point['seconds']:.0f} s"
            )

    def note(self, text: str) -> None:
        # Without styles, since paths may have brackets.
        self.console.print(visible(text), soft_wrap=True, highlight=False, markup=False)
