"""Runs side by side: plain and decoupled, over their seeds."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from dcnet.escapes import visible
from dcnet.training.config import completed

Record = dict[str, Any]


def grouped(records: Sequence[Record]) -> dict[tuple[str, str, str], list[Record]]:
    """Records that differ in nothing but the seed, by dataset, network and operator."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        rest = {name: value for name, value in completed(record["config"]).items() if name != "seed"}
        groups.setdefault(repr(sorted(rest.items(), key=str)), []).append(record)
    found: dict[tuple[str, str, str], list[Record]] = {}
    for members in groups.values():
        config = completed(members[0]["config"])
        margin = f", {config['margin']}" if config.get("margin") else ""
        name = (config["dataset"], config["model"], config["operator"] + margin)
        # Two recipes of one operator are two rows.
        while name in found:
            name = (*name[:2], name[2] + "'")
        found[name] = members
    return found


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The mean, with the deviation where there is more than one; nothing of none."""
    if not values:
        return ""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def summary_table(records: Sequence[Record]) -> Table:
    """Test accuracy at the last step, and what it took; what all runs have in common is in the title."""
    rows = grouped(records)
    common = [len({name[i] for name in rows}) == 1 for i in range(3)]
    seeds = max(len(members) for members in rows.values())
    shared = ", ".join(next(iter(rows))[i] for i in range(2) if common[i])
    same = all(len(members) == seeds for members in rows.values())
    about = f"mean ± deviation of {'' if same else 'up to '}{seeds} seeds" if seeds > 1 else "one seed"
    table = Table(
        title=Text(visible(", ".join(word for word in (shared, "last step", about) if word)), style="table.title")
    )
    headings = [heading for heading, same in zip(("dataset", "network"), common, strict=False) if not same]
    for heading in (*headings, "operator"):
        table.add_column(heading, overflow="fold")
    for heading in ("parameters", "test accuracy, %", "train loss", "seconds a run"):
        table.add_column(heading, justify="right")
    for name, members in rows.items():
        own = [name[i] for i in range(2) if not common[i]]
        # As text, since specs may have brackets that rich would take for styles.
        table.add_row(*(Text(visible(word)) for word in (*own, name[2], *_numbers(members))))
    return table


def _numbers(members: Sequence[Record]) -> list[str]:
    """What the records have of them; one from elsewhere may lack any."""
    results = [record.get("results") or {} for record in members]
    parameters = members[0].get("parameters")
    seconds = _known(record.get("timings", {}).get("total") for record in members)
    return [
        "" if parameters is None else f"{parameters:,}",
        spread(_known(result.get("test_accuracy") for result in results)),
        spread(_known(result.get("train_loss") for result in results), 4),
        f"{statistics.median(seconds):.1f}" if seconds else "",
    ]


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
