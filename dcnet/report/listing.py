"""Rows with names, as a table on the terminal or as JSON."""

import json
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from dcnet.escapes import visible

Row = dict[str, Any]
# Wide enough for the names of runs where nobody says how wide it may be, as in a file or a pipe.
WIDTH_ELSEWHERE = 160
# With less, a column that gives way would be a letter or two in each line, or nothing at all.
LEAST_LONG = 8


@dataclass(frozen=True)
class Listing:
    """Rows, and how they are shown: a column for each heading, with what it makes of a row.

    `numbers` are the headings of columns that are aligned to the right, `long` those that give way on a narrow page.
    """

    title: str
    columns: Mapping[str, Callable[[Row], str]]
    rows: Sequence[Row]
    numbers: Collection[str] = ()
    long: Collection[str] = ()
    caption: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._table(fold_all=self._least_width() > options.max_width)

    def _least_width(self) -> int:
        """With all that is not long on one line, and a little of what is."""
        widths = [
            LEAST_LONG if heading in self.long else max(cell_len(text) for text in (heading, *self._cells(cell)))
            for heading, cell in self.columns.items()
        ]
        # A space on both sides of each column, and the lines between them.
        return sum(widths) + 3 * len(widths) + 1

    def _table(self, fold_all: bool) -> Table:
        """What is not long is cut off where it does not fit, unless all is folded."""
        table = Table(
            title=Text(visible(self.title), style="table.title"), caption=self.caption or None, caption_justify="left"
        )
        for heading in self.columns:
            side: Literal["right", "left"] = "right" if heading in self.numbers else "left"
            table.add_column(heading, justify=side, overflow="fold", no_wrap=not (fold_all or heading in self.long))
        for row in self.rows:
            # As text, since specs have brackets that rich would take for styles.
            table.add_row(*[Text(visible(cell(row))) for cell in self.columns.values()])
        return table

    def _cells(self, cell: Callable[[Row], str]) -> list[str]:
        return [visible(cell(row)) for row in self.rows]


def show(listings: Mapping[str, Listing], as_json: bool) -> int:
    """Prints the tables, or one JSON document: the rows by the name of the listing, or those of the only one."""
    if as_json:
        rows = {name: list(listing.rows) for name, listing in listings.items()}
        print_json(rows if len(rows) > 1 else next(iter(rows.values())))
        return 0
    for listing in listings.values():
        console().print(listing)
    return 0


def print_json(value: Any) -> None:
    """JSON as people read it, with escapes for what would steer the terminal, or what the output cannot show."""
    plain = not (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    text = json.dumps(value, indent=2, allow_nan=False, ensure_ascii=plain)
    print("".join(sign if sign == "\n" or sign.isprintable() else json.dumps(sign)[1:-1] for sign in text))


def console(stderr: bool = False) -> Console:
    """The terminal, or a wide page where the output goes elsewhere."""
    known = (sys.stderr if stderr else sys.stdout).isatty() or "COLUMNS" in os.environ
    return Console(width=None if known else WIDTH_ELSEWHERE, stderr=stderr)


def yes_or_no(claim: bool | None) -> str:
    return "unknown" if claim is None else "yes" if claim else "no"


def first_line(documented: object) -> str:
    """The first line of a docstring, which says it all in short."""
    return (documented.__doc__ or "").strip().partition("\n")[0]
