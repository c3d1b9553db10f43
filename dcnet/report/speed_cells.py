"""Texts of benchmark tables and charts: shapes, devices, numbers, and rows without a time."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dcnet.table import Table

Record = Mapping[str, Any]
Row = Mapping[str, Any]


def spell(shape: str) -> str:
    """Formats the shape `N512xC64x32` of a record as `N512 C64 32x32`, with filter size and groups if not the usual.

    `M50432x384-1536` is `M50432, 384 to 1536`, and `B64xH6xT197xD64` is `B64 H6 T197 D64`.
    """
    first, *parts = shape.split("x")
    if first.startswith("M"):
        return f"{first}, {parts[0].replace('-', ' to ')}"
    if first.startswith("B"):
        return " ".join([first, *parts])
    channels, *sizes = parts
    sides = [size for size in sizes if size[0] not in "KG"]
    found = {size[0]: int(size[1:]) for size in sizes if size[0] in "KG"}
    text = f"{first} {channels} {_sides(sides)}"
    text += f", {_filters(found['K'], _dimensions(sides))}" if "K" in found else ""
    groups = found.get("G", 1)
    depthwise = groups > 1 and f"C{groups}" == channels
    return text + (", depthwise" if depthwise else f", {groups} groups" if groups > 1 else "")


def _filters(size: int, dimensions: int) -> str:
    return f"filters of {size}" if dimensions == 1 else f"{'x'.join([str(size)] * dimensions)} filters"


def _dimensions(sides: Sequence[str]) -> int:
    return {"L": 1, "D": 3}.get(sides[0][0], 2)


def _sides(sides: Sequence[str]) -> str:
    """Formats the sides of images, of volumes, or the length of sequences; a single side of images is repeated."""
    if _dimensions(sides) == 1:
        return sides[0]
    if _dimensions(sides) == 3:
        return f"{sides[0][1:]}x{sides[1]}x{sides[-1]}"
    return f"{sides[0]}x{sides[-1]}"


def twin_of(shape: str) -> str:
    """Returns the name of torch's layer that layers of this shape are compared with."""
    if shape.startswith("M"):
        return "nn.Linear"
    if shape.startswith("B"):
        return "scaled_dot_product_attention"
    return {"L": "nn.Conv1d", "D": "nn.Conv3d"}.get(shape.split("x")[2][0], "nn.Conv2d")


def count_blocks(record: Record) -> str:
    """Returns the number of timed blocks, as "4 blocks"; empty if the record is not about blocks."""
    count = record["config"].get("blocks")
    return "" if count is None else "1 block" if count == 1 else f"{count} blocks"


def where(record: Record) -> str:
    """Returns the device: the name of the GPU, or the number of CPU threads."""
    config, environment = record["config"], record["environment"]
    if config["device"] == "cuda":
        return str(environment.get("gpu", "GPU"))
    return f"CPU, {config['threads']} thread" + ("" if config["threads"] == 1 else "s")


def form(row: Record) -> str:
    """Describes the form of a network in evaluation: trained or folded, and compiled or not."""
    return ("folded" if row["folded"] else "trained") + (", compiled" if row["compiled"] else "")


def problem(row: Record) -> str:
    """Returns in one word why a row has no time; empty if it has one."""
    return next((name for name in ("skipped", "wrong", "failed") if row.get(name)), "")


def two_digits(ratio: float | None) -> str:
    """Formats a ratio with two decimals; empty if it is unknown."""
    return "" if ratio is None else f"{ratio:.2f}"


def three_digits(ms: float) -> str:
    """Formats milliseconds with three significant digits."""
    return f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}" if ms >= 1 else f"{ms:.3f}"


def matches(row: Row, **wanted: Any) -> bool:
    """Returns whether the row has all these values."""
    return all(row[name] == value for name, value in wanted.items())


def unique(rows: Iterable[Row], key: str) -> list[Any]:
    """Returns the values of a key, without duplicates."""
    return list(dict.fromkeys(row[key] for row in rows))


def memory_heading(record: Record) -> str:
    return "peak, MiB" if record["config"]["device"] == "cuda" else "kept, MiB"


def mib_of(row: Row) -> float:
    mib: float = row["peak_mib"] if "peak_mib" in row else row["kept_mib"]
    return mib


def setting(record: Record) -> str:
    """Returns the end of a title: dtype, layout, device and version."""
    return f", {record['config']['dtype']}, channels last, {place(record)}"


def place(record: Record) -> str:
    return f"{where(record)}, torch {record['environment']['torch']}"


def without_empty(table: Table, heading: str) -> Table:
    """Leaves out the column with this heading if all its cells are empty."""
    at = table.headings.index(heading)
    if any(row[at] for row in table.rows):
        return table
    columns = [column for column in table.columns if column.heading != heading]
    return dataclasses.replace(table, columns=columns, rows=[[*row[:at], *row[at + 1 :]] for row in table.rows])
