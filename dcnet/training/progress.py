"""A run as a line that moves: loss, accuracy, images per second and the time that is left."""

from importlib.util import find_spec
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from dcnet.escapes import visible
from dcnet.training.watching import Point, Watcher

# Below, a name and all numbers would leave no room for the bar, the steps and the time.
NARROW, SHORT_NAME = 110, 20


def moves(console: Console) -> bool:
    """Whether lines can be drawn anew: on a terminal, and in a notebook that has widgets."""
    return console.is_terminal or (console.is_jupyter and find_spec("ipywidgets") is not None)


def bars(console: Console) -> Progress:
    """Lines that move, where they can, each with a name, a bar, steps, `numbers` and the time that is left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not moves(console),
    )


class Shown(Watcher):
    """Shows a bar on a terminal or in a notebook, and elsewhere, in a log, the name and a line for each evaluation.

    Use it in a `with` block, and give it to a `Trainer` as its watcher.

    Args:
        console: where to; None for standard output, or the cell of a notebook.
    """

    def __init__(self, console: Console | None = None):
        self.console, self.task = console or Console(), TaskID(0)
        self.tested, self.narrow, self.moves = "", self.console.width < NARROW, moves(self.console)
        self.progress = bars(self.console)

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
        elif not self.moves:
            self.note(name)

    def steps(self, done: int, loss: float, accuracy: float, images_per_second: float) -> None:
        numbers = f"loss {loss:.3f}{self.tested}"
        if not self.narrow:
            numbers = f"loss {loss:.3f}  train {accuracy:.1f} %{self.tested}  {images_per_second:,.0f} images/s"
        self.progress.update(self.task, completed=done, numbers=numbers)

    def evaluated(self, point: Point) -> None:
        self.tested = f"  test {point['test_accuracy']:.2f} %"
        if not self.moves:
            self.note(
                f"step {point['step']:.0f}, epoch {point['epoch']:.1f}: loss {point['train_loss']:.4f}, "
                f"train {point['train_accuracy']:.2f} %, test {point['test_accuracy']:.2f} %, {point['seconds']:.0f} s"
            )

    def note(self, text: str) -> None:
        # Without styles, since paths may have brackets.
        self.console.print(visible(text), soft_wrap=True, highlight=False, markup=False)
