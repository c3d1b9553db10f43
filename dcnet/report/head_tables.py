"""The record of heads made into Markdown tables."""

from typing import Any

from dcnet.report.markdown import markdown
from dcnet.report.words import problem, three_digits, two_digits, where

Record = dict[str, Any]
Row = dict[str, Any]
HEADINGS = {"linear": "`nn.Linear`", "margin": "`MarginSoftmax`", "sharded": "one share", "sampled": "{:.0%} sampled"}


def heads(record: Record) -> str:
    """Time and memory of each head by the number of classes, a table for each batch, and the estimate."""
    tables = [_batch(record, batch) for batch in record["config"]["batches"]]
    estimate = record.get("estimates", {"rows": []})
    return "\n\n".join([*tables, _estimate(estimate, record["free_gib"])] if estimate["rows"] else tables)


def _batch(record: Record, batch: int) -> str:
    config, lines = record["config"], []
    for classes in config["classes"]:
        rows = [row for row in record["results"] if (row["classes"], row["batch"]) == (classes, batch)]
        least = max(row["floor_ms"] for row in rows), max(row["floor_mib"] for row in rows)
        times, peaks = zip(*map(_cells, rows), strict=True)
        lines.append([f"{classes:,}", *times, three_digits(least[0]), *peaks, _gib(least[1])])
    names = [HEADINGS[head].format(config["sample"]) for head in config["heads"]]
    headings = [
        "classes",
        *(f"{name}, ms" for name in (*names, "floor")),
        *(f"{name}, GiB" for name in (*names, "floor")),
    ]
    setting = (
        f"{config['features']} features, {config['dtype']}, {where(record)}, torch {record['environment']['torch']}"
    )
    return f"`{config['margin']}`, batch {batch}, {setting}:\n\n{markdown(headings, lines)}"


def _cells(row: Row) -> tuple[str, str]:
    if found := "skipped" if row["skipped"] else problem(row):
        return found, ""
    training, ratio = row["training"], row["training"]["ratio"]
    time = three_digits(training["ms"])
    plain = row["head"] == "linear" or ratio is None
    return time if plain else f"{time} (x {two_digits(ratio)})", _gib(row["peak_mib"])


def _gib(mib: float | None) -> str:
    return "" if mib is None else f"{mib / 1024:.3f}" if mib < 1024 else f"{mib / 1024:.1f}"


def room_of(gib: float, free: float | None) -> str:
    """GiB that a device would need, and whether it is more than there is."""
    return f"{gib:.1f}" + (" (too much)" if free is not None and gib > free else "")


def _estimate(estimate: Row, free: float | None) -> str:
    rows = estimate["rows"]
    about = f"Estimate for {rows[0]['gpus']} of them, with {rows[0]['joint_batch']:,} samples together; each has"
    lines = [_estimated(row, free) for row in rows]
    headings = ["classes", "head", "memory, GiB", "compute, ms", "gathered, MB", "reduced, MB", "link, ms", "step, ms"]
    said = "\n".join(f"- {sentence}" for sentence in estimate["assumptions"])
    return f"{about}:\n\n{markdown(headings, lines)}\n\n{said}"


def _estimated(row: Row, free: float | None) -> list[str]:
    passed = [f"{row[name] / 1e6:.0f}" for name in ("gathered_bytes", "reduced_bytes")]
    compute, link, step = (f"{row[name]:,.1f}" for name in ("compute_ms", "link_ms", "total_ms"))
    return [f"{row['classes']:,}", row["head"], room_of(row["memory_gib"], free), compute, *passed, link, step]
