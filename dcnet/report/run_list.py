"""The runs in a folder, one row each; a record that cannot be read is a row, too."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from dcnet.report.listing import Listing, Row
from dcnet.training import Run, all_runs

UNREADABLE = "unreadable"


def runs(root: Path) -> Listing:
    """The runs in a folder, the newest last."""
    columns = {
        "name": lambda row: row["name"],
        "status": lambda row: row["status"],
        "steps": _steps,
        "test, %": lambda row: _number(row["test_accuracy"], ".2f"),
        "seconds": lambda row: _number(row["seconds"], ".0f" if (row["seconds"] or 0) >= 100 else ".1f"),
        "date": lambda row: _local(row["date"]),
    }
    rows = sorted((_row(run) for run in all_runs(root)), key=lambda row: row["date"] or "")
    caption = "test: accuracy in the last evaluation"
    return Listing(f"runs in {root}", columns, rows, ("steps", "test, %", "seconds"), ("name",), caption)


def problems(rows: Sequence[Row]) -> list[str]:
    """What is wrong with the records that could not be read."""
    return [row["problem"] for row in rows if row["problem"]]


def _row(run: Run) -> Row:
    found: Row = {"name": run.folder.name, "folder": str(run.folder), "status": UNREADABLE, "problem": None}
    found |= dict.fromkeys(("steps", "steps_done", "test_accuracy", "seconds", "date"))
    try:
        return found | _told(run.record())
    except ValueError as error:
        return found | {"problem": str(error)}
    except (AttributeError, KeyError, TypeError) as error:
        return found | {"problem": f"{str(run.record_file)!r} is not a record of a run: {error!r}"}


def _told(record: dict[str, Any]) -> Row:
    accuracies = [value for value in record["curves"].get("test_accuracy", []) if value is not None]
    date = (record.get("environment") or {}).get("date")
    if date is not None:
        datetime.fromisoformat(date)
    return {
        "status": record["status"],
        "operator": record["config"].get("operator"),
        "steps": record.get("steps"),
        "steps_done": record.get("steps_done"),
        "test_accuracy": accuracies[-1] if accuracies else None,
        "seconds": (record.get("timings") or {}).get("total"),
        "date": date,
    }


def _steps(row: Row) -> str:
    """Done and all; a network that was converted has none."""
    return f"{row['steps_done'] or 0}/{row['steps']}" if row["steps"] else ""


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _local(date: str | None) -> str:
    return "" if date is None else f"{datetime.fromisoformat(date).astimezone():%Y-%m-%d}"
