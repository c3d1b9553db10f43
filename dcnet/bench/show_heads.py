"""The record of heads as tables on the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from dcnet.report.head_tables import room_of
from dcnet.report.words import problem, three_digits, two_digits, where

Record = Mapping[str, Any]
Row = Mapping[str, Any]
FLOOR = "floor: every byte moved once in each pass and every product formed, at the best speed of this device"


def heads(record: Record) -> list[Table]:
    """A table for each batch, and one of the estimate for many GPUs where there is one."""
    tables = [_measured(record, batch) for batch in record["config"]["batches"]]
    estimate = record.get("estimates", {"rows": []})
    return [*tables, _estimated(estimate, record["free_gib"])] if estimate["rows"] else tables


def _measured(record: Record, batch: int) -> Table:
    config = record["config"]
    title = f"training step of a head, {config['margin']}, batch {batch}, {config['features']} features"
    headings = ("ms", "x linear", "floor, ms", "peak, MiB", "floor, MiB")
    table = _table(f"{title}, {config['dtype']}, {where(record)}", headings, FLOOR)
    before = None
    for row in [row for row in record["results"] if row["batch"] == batch]:
        same = row["classes"] == before
        if not same:
            table.add_section()
        table.add_row("" if same else f"{row['classes']:,}", row["head"], *_cells(row))
        before = row["classes"]
    return table


def _table(title: str, headings: Sequence[str], caption: str) -> Table:
    table = Table(title=title, caption=caption, caption_justify="left")
    table.add_column("classes", justify="right")
    table.add_column("head")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _cells(row: Row) -> list[str]:
    if found := "skipped" if row["skipped"] else problem(row):
        return [found]
    peak = "" if row["peak_mib"] is None else f"{row['peak_mib']:,.0f}"
    times = [three_digits(row["training"]["ms"]), two_digits(row["training"]["ratio"]), three_digits(row["floor_ms"])]
    return [*times, peak, f"{row['floor_mib']:,.0f}"]


def _estimated(estimate: Mapping[str, Any], free: float | None) -> Table:
    first = estimate["rows"][0]
    title = f"estimate for {first['gpus']} GPUs, a joint batch of {first['joint_batch']:,}: each GPU's"
    headings = ("GiB", "compute, ms", "link, MB", "link, ms", "step, ms")
    table = _table(title, headings, "\n".join(f"- {said}" for said in estimate["assumptions"]))
    for row in estimate["rows"]:
        passed = (row["gathered_bytes"] + row["reduced_bytes"]) / 1e6
        times = [three_digits(row[name]) for name in ("compute_ms", "link_ms", "total_ms")]
        memory = room_of(row["memory_gib"], free)
        table.add_row(f"{row['classes']:,}", row["head"], memory, times[0], f"{passed:.0f}", *times[1:])
    return table
