"""What a conversion changes and what it leaves, as rows and as a table."""

from __future__ import annotations

import io
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

TEXT_WIDTH = 160


@dataclass(frozen=True)
class Row:
    """One layer: what it was and what it becomes, or None and the reason why it is left."""

    layer: str
    shape: str
    before: str
    after: str | None
    note: str = ""


@dataclass(frozen=True)
class Conversion:
    """Every convolution and linear layer of a network, in the order of their definition.

    `print` shows a text, `rich.print` a table.
    """

    rows: tuple[Row, ...]

    @property
    def changed(self) -> list[str]:
        """The names of the layers that change."""
        return [row.layer for row in self.rows if row.after is not None]

    @property
    def left(self) -> dict[str, str]:
        """The reason for each layer that is left, by its name."""
        return {row.layer: row.note for row in self.rows if row.after is None}

    def __rich__(self) -> Table:
        title = f"layers changed: {len(self.changed)}, left: {len(self.left)}"
        table = Table("layer", "shape", "before", "after", "note", title=title)
        for row in self.rows:
            cells = (row.layer or "(the model)", row.shape, row.before, row.after or "", row.note)
            table.add_row(*[Text(cell) for cell in cells], style=None if row.after else "dim")
        return table

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=TEXT_WIDTH).print(self)
        return text.getvalue().rstrip("\n")
