"""Tables that render to the terminal, Markdown and HTML."""

import html
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import rich.table
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from dcnet.terminal import visible

Row = Mapping[str, Any]
Align = Literal["left", "right"]
# By heading: a key of the record, or a function of the record.
Cells = Mapping[str, str | Callable[[Any], str]]
# A narrower column would hold a letter or two per line.
MIN_WRAPPED_WIDTH = 8
# A bar in a cell of Markdown.
BAR = "\\|"


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        heading: the text above its cells.
        align: the alignment of its cells.
        wraps: cells may wrap on a narrow terminal.
        code: Markdown sets its cells as code.
        detail: Markdown leaves it out.
    """

    heading: str
    align: Align = "left"
    wraps: bool = False
    code: bool = False
    detail: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of text.

    Attributes:
        columns: headings and alignment.
        rows: one text per column; a shorter row is filled up with empty cells.
        title: printed above the table on a terminal, and the caption in HTML.
        notes: lines below the table on a terminal.
        records: the records that the rows were made of, for JSON.
        sections: the terminal draws a line above the rows with these indices.
        dim: the terminal prints the rows with these indices dimmed.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    title: str = ""
    notes: Sequence[str] = ()
    records: Sequence[Row] = field(default=(), repr=False)
    sections: Collection[int] = ()
    dim: Collection[int] = ()

    @classmethod
    def of_records(
        cls,
        records: Iterable[Row],
        cells: Cells,
        *,
        right: Collection[str] = (),
        wraps: Collection[str] = (),
        title: str = "",
        notes: Sequence[str] = (),
    ) -> "Table":
        """A row per record; `right` names the right-aligned columns, `wraps` those that may wrap."""
        records = list(records)
        columns = [Column(name, "right" if name in right else "left", name in wraps) for name in cells]
        rows = [[_cell(cell, record) for cell in cells.values()] for record in records]
        return cls(columns, rows, title, notes, records)

    @classmethod
    def of_rows(
        cls,
        headings: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        names: int = 1,
        code: Collection[str] = (),
        title: str = "",
        notes: Sequence[str] = (),
        sections: Collection[int] = (),
    ) -> "Table":
        """Rows of text: the first `names` columns are left-aligned and may wrap, the others are right-aligned."""
        left = [Column(heading, wraps=True, code=heading in code) for heading in headings[:names]]
        right = [Column(heading, "right") for heading in headings[names:]]
        return cls([*left, *right], rows, title, notes, sections=sections)

    @property
    def headings(self) -> list[str]:
        return [column.heading for column in self.columns]

    def markdown(self) -> str:
        """The columns and rows, without title, notes and details."""
        shown = [i for i, column in enumerate(self.columns) if not column.detail]
        rules = ["---:" if column.align == "right" else "---" for column in self.columns]
        lines = [self.headings, rules, *([*map(_markdown, row, self.columns)] for row in map(self._filled, self.rows))]
        return "\n".join(f"| {' | '.join(line[i].replace('|', BAR) for i in shown)} |" for line in lines)

    def markdown_section(self) -> str:
        """The title and a colon, the table, and the notes as a list."""
        notes = ["\n".join(f"- {note}" for note in self.notes)] if self.notes else []
        return "\n\n".join([f"{self.title}:", self.markdown(), *notes])

    def html(self, key: str) -> str:
        """A `<table>` whose caption has the id `<key>-caption`; the first cell of a row is its heading.

        Cells with a method `__html__` are markup, all others are escaped.
        """
        head = "".join(f'<th scope="col">{_escaped(heading)}</th>' for heading in self.headings)
        body = "".join(f"<tr>{_html_row(self._filled(row))}</tr>" for row in self.rows)
        caption = f'<caption id="{html.escape(key)}-caption">{_escaped(self.title)}</caption>'
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._rich_table(options.max_width)

    def _rich_table(self, space: int) -> rich.table.Table:
        """Only long columns wrap, unless the table is too wide even so."""
        title = Text(visible(self.title), style="table.title") if self.title else None
        notes = Text(visible("\n".join(self.notes), kept="\n"), style="table.caption") if self.notes else None
        padding, widths = self._layout(space)
        wrap_all = self._least_width() > space
        table = rich.table.Table(title=title, caption=notes, caption_justify="left", padding=(0, padding))
        sizes: Sequence[int | None] = widths or [None] * len(self.columns)
        for column, width in zip(self.columns, sizes, strict=True):
            # Given widths have space for the cells of columns that do not wrap.
            no_wrap = not (widths or wrap_all or column.wraps)
            table.add_column(Text(column.heading), justify=column.align, overflow="fold", no_wrap=no_wrap, width=width)
        for at, row in enumerate(self.rows):
            if at in self.sections:
                table.add_section()
            # Text, since specs contain brackets, which rich would read as styles.
            table.add_row(*(Text(visible(cell)) for cell in row), style="dim" if at in self.dim else None)
        return table

    def _layout(self, space: int) -> tuple[int, list[int] | None]:
        """Returns the spaces around a cell, and the widths of columns; None if they do not fit into the space."""
        for padding, widths in self._layouts():
            if sum(widths) + (2 * padding + 1) * len(widths) + 1 <= space:
                return padding, widths
        return 1, None

    def _layouts(self) -> Iterator[tuple[int, list[int]]]:
        """Yields layouts, the best first: the widest columns are narrowed first, and words are broken last."""
        whole, words = self._whole, self._words
        for padding in (1, 0):
            for limit in range(max(whole, default=0), 0, -1):
                yield padding, [max(few, min(limit, width)) for few, width in zip(words, whole, strict=True)]
        for limit in range(max(words, default=0), MIN_WRAPPED_WIDTH - 1, -1):
            wraps = (column.wraps for column in self.columns)
            yield 0, [min(limit, few) if wrap else few for wrap, few in zip(wraps, words, strict=True)]

    @property
    def _whole(self) -> list[int]:
        """The widths of columns that do not wrap at all."""
        return [max(map(cell_len, cells)) for cells in self._cells()]

    @property
    def _words(self) -> list[int]:
        """The widths of columns at which no word is broken, and no cell of a column that does not wrap."""
        kept = [
            [*heading.split(), *(word for cell in cells for word in (cell.split() if column.wraps else [cell]))]
            for column, (heading, *cells) in zip(self.columns, self._cells(), strict=True)
        ]
        return [max(map(cell_len, words), default=0) for words in kept]

    def _cells(self) -> list[tuple[str, ...]]:
        """The headings and cells of each column, as the terminal shows them."""
        return list(zip(self.headings, *([*map(visible, self._filled(row))] for row in self.rows), strict=True))

    def _least_width(self) -> int:
        """The width with only the wrapping columns wrapped."""
        whole = zip(self.columns, self._whole, strict=True)
        # A space on both sides of each column, and the lines between columns.
        return sum(MIN_WRAPPED_WIDTH if one.wraps else width for one, width in whole) + 3 * len(self.columns) + 1

    def _filled(self, row: Sequence[str]) -> list[str]:
        return [*row, *[""] * (len(self.columns) - len(row))]


def _cell(cell: str | Callable[[Any], str], record: Row) -> str:
    return cell(record) if callable(cell) else str(record[cell])


def _markdown(cell: str, column: Column) -> str:
    return f"`{cell}`" if column.code and cell else cell


def _html_row(row: Sequence[str]) -> str:
    return f'<th scope="row">{_escaped(row[0])}</th>' + "".join(f"<td>{_escaped(cell)}</td>" for cell in row[1:])


def _escaped(cell: Any) -> str:
    return cell.__html__() if hasattr(cell, "__html__") else html.escape(cell, quote=False)
