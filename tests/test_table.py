"""Tables in the terminal, Markdown and HTML."""

import io

from rich.console import Console

from dcnet.table import Column, Table

RECORDS = [{"name": "a|b", "count": 1}, {"name": "<i>[red]", "count": 20}]


def made() -> Table:
    cells = {"name": "name", "count, %": lambda record: f"{record['count']:.1f}"}
    return Table.of_records(RECORDS, cells, right=("count, %",), wraps=("name",), title="Title", notes=["A note."])


def printed(table: Table, width: int = 60) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


def test_markdown_aligns_numbers_and_escapes_bars():
    assert made().markdown().splitlines() == [
        "| name | count, % |",
        "| --- | ---: |",
        "| a\\|b | 1.0 |",
        "| <i>[red] | 20.0 |",
    ]


def test_a_markdown_section_has_title_and_notes():
    assert made().markdown_section().startswith("Title:\n\n| name |")
    assert made().markdown_section().endswith("\n\n- A note.")


def test_markdown_sets_code_and_leaves_details_out():
    columns = [Column("name", code=True), Column("detail", detail=True), Column("note")]
    assert Table(columns, [["a", "b"]]).markdown().splitlines()[-1] == "| `a` |  |"


def test_html_escapes_text_but_not_markup():
    class Markup(str):
        def __html__(self) -> str:
            return str(self)

    text = Table.of_rows(["x", "<y>"], [["<i>", Markup("<b>1</b>")]], title="T").html("key")
    assert '<th scope="row">&lt;i&gt;</th><td><b>1</b></td>' in text
    assert '<caption id="key-caption">T</caption>' in text
    assert '<th scope="col">&lt;y&gt;</th>' in text


def test_terminal_shows_brackets_literally_and_escapes_control_characters():
    text = printed(Table.of_rows(["name"], [["[red]x"], ["\x1b[2J"]], title="Title", notes=["A note."]))
    for expected in ("Title", "[red]x", "\\x1b[2J", "A note."):
        assert expected in text


def test_a_narrow_terminal_wraps_only_columns_that_may_wrap():
    table = Table([Column("a", wraps=True), Column("b", "right")], [["long " * 20, "12345678"]])
    assert "12345678 │" in printed(table, 40)
    assert "12345678│" in printed(table, 18)
    assert "12345678" not in printed(table, 14)


def test_words_are_broken_only_if_there_is_no_space_for_them():
    headings = ("recipe", "all corruptions", "brightness")
    columns = [Column(heading, wraps=True) for heading in headings]
    table = Table(columns, [["plain, standardized: SGD 0.15, decay 0.001", "12.88 ± 0.17", "10.41 ± 0.25"]])
    # The longest words take 13 + 11 + 10, the lines between columns 4, and the space around cells 6, if there is any.
    for width in (38, 44, 50, 60):
        text = printed(table, width)
        assert all(len(line) <= width for line in text.splitlines())
        for word in ("standardized:", "corruptions", "brightness"):
            assert word in text
    # Without the space around cells, 5 columns are left for the widest ones.
    assert "12.88 ± 0.17" in printed(table, 43)
    # Only the longest word is broken.
    text = printed(table, 37)
    assert "standardized:" not in text
    assert all(word in text for word in ("corruptions", "brightness"))


def test_headings_wrap_even_if_cells_do_not():
    table = Table([Column("images per second", "right")], [["1 234"]])
    text = printed(table, 11)
    assert all(word in text for word in ("images", "per", "second", "1 234"))


def test_wide_columns_are_narrowed_before_narrow_ones():
    columns = [Column("recipe", wraps=True), Column("error", wraps=True)]
    assert "12.88 ± 0.17" in printed(Table(columns, [["word " * 20, "12.88 ± 0.17"]]), 40)


def test_short_rows_are_padded_with_empty_cells():
    table = Table.of_rows(["a", "b"], [["x"]])
    assert table.markdown().endswith("| x |  |")
    assert "x" in printed(table)


def test_a_table_of_records_keeps_them():
    assert made().records == RECORDS
