"""The tables of `dcnet list`: operators, networks, datasets, recipes, margins and runs."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dcnet
from dcnet import training
from dcnet.files import fingerprint, write_atomically
from dcnet.table import Cells, Table
from dcnet.terminal import console, print_json

if TYPE_CHECKING:
    import dcnet.component
    from dcnet.component import Component
    from dcnet.training import Record, Run, RunConfig

Row = dict[str, Any]
CLASSES, OPERATOR = 100, "tanh-cos"
STORED = Path(__file__).with_name("operators.json")
UNREADABLE = "unreadable"


def show(tables: Mapping[str, Table], as_json: bool) -> int:
    """Prints the tables. As JSON, prints the rows by name of the table, or only the rows of a single table."""
    if as_json:
        rows = {name: list(table.records) for name, table in tables.items()}
        print_json(rows if len(rows) > 1 else next(iter(rows.values())))
        return 0
    for table in tables.values():
        console().print(table)
    return 0


def yes_or_no(claim: bool | None) -> str:
    return "unknown" if claim is None else "yes" if claim else "no"


def first_line(documented: object) -> str:
    """Returns the first line of a docstring."""
    return (documented.__doc__ or "").strip().partition("\n")[0]


def operators() -> dict[str, Table]:
    """Returns the tables of magnitudes, angles and weightings; an operator has one of each.

    The registries need torch, which takes long to import. If they are not imported yet, they have no custom entries,
    so the rows are read from a file instead.
    """
    stored = {} if "dcnet.component" in sys.modules else json.loads(STORED.read_text(encoding="utf-8"))
    rows: dict[str, list[Row]] = stored["rows"] if stored.get("sources") == _sources_hash() else operator_rows()
    cells: Cells = {
        "name": "name",
        "equation": "equation",
        "bounded": lambda row: yes_or_no(row["bounded"]),
        "smooth": lambda row: yes_or_no(row["smooth"]),
        "constants": "described",
    }
    wraps = ("equation", "constants")
    by_norm = "magnitudes: functions of the patch norm n"
    by_angle = "angles: functions of the angle theta between filter and patch"
    return {
        "magnitudes": Table.of_records(rows["magnitudes"], cells, title=by_norm, wraps=wraps),
        "angles": Table.of_records(rows["angles"], cells, title=by_angle, wraps=wraps),
        "weightings": _weightings(rows["weightings"]),
    }


def operator_rows() -> dict[str, list[Row]]:
    """Returns the registered magnitudes, angles and weightings as JSON values."""
    symbols = {"x": "h(||x||)", "w": "h(||w||)", "both": "h(||w|| ||x||)", "scale": "alpha"}
    return {
        "magnitudes": [_part(made(), "h(n)") for made in dcnet.magnitude.registry.values()],
        "angles": [_part(made(), "g(theta)") for made in dcnet.angle.registry.values()],
        "weightings": [
            {"name": name, "equation": made.equation.format(**symbols), "keeps_bound": made.keeps_bound}
            for name, made in dcnet.weighting.registry.items()
        ],
    }


def _sources_hash() -> str:
    """Returns a hash of the source files of the registries; if it has changed, the stored file is not used."""
    names = ("magnitude.py", "angle.py", "weighting.py")
    return " ".join(fingerprint(Path(dcnet.__file__).with_name(name))[:16] for name in names)


def store_operators() -> bool:
    """Writes the file that `operators` reads; returns whether it was stale."""
    content = (json.dumps({"sources": _sources_hash(), "rows": operator_rows()}, indent=1) + "\n").encode()
    stale = not STORED.exists() or STORED.read_bytes() != content
    if stale:
        write_atomically(STORED, content)
    return stale


def _part(part: Component, symbol: str) -> Row:
    held, claims = dcnet.component.Term(part), {name: getattr(part, name) for name in ("bounded", "smooth")}
    return {
        "name": part.name,
        "about": first_line(type(part)),
        "equation": f"{symbol} = {held.equation(n='n')}",
        **claims,
        "constants": {name: dataclasses.asdict(slot) for name, slot in part.slots().items()},
        "described": ", ".join([*held.describe(), *_without_symbol(part)]),
    }


def _without_symbol(part: Component) -> list[str]:
    """Describes the constants that are not in the equation, such as the slopes of a spline."""
    slots = {name: slot for name, slot in part.slots().items() if name not in part.symbols()}
    return [f"{slot.size} {name} = {slot}" for name, slot in slots.items()]


def _weightings(rows: list[Row]) -> Table:
    cells: Cells = {
        "name": "name",
        "equation": "equation",
        "stays bounded": lambda row: yes_or_no(row["keeps_bound"]),
    }
    note = (
        'An operator is written magnitude-angle or magnitude-angle+weighting: tanh-cos, "seg(slope=0.2)-sqcos+linear".'
    )
    return Table.of_records(rows, cells, title="weightings: factors by the norm of the filter", notes=[note])


def models() -> Table:
    """Returns the table of networks, with their numbers of parameters at width 1."""
    cells: Cells = {
        "name": "name",
        "about": "about",
        dcnet.PLAIN: lambda row: f"{row['parameters'][dcnet.PLAIN]:,}",
        OPERATOR: lambda row: f"{row['parameters'][OPERATOR]:,}",
    }
    rows = [
        {
            "name": name,
            "about": first_line(entry.build),
            "parameters": {
                operator: dcnet.models.create.count_parameters(name, operator, CLASSES)
                for operator in (dcnet.PLAIN, OPERATOR)
            },
        }
        for name, entry in dcnet.models.networks.items()
    ]
    others = " and ".join(f"{prefix}:<name>" for prefix in dcnet.models.create.prefixes)
    note = f"{dcnet.PLAIN} and {OPERATOR}: parameters at width 1 with {CLASSES} classes. Also available: {others}."
    right, wraps = (dcnet.PLAIN, OPERATOR), ("about",)
    return Table.of_records(rows, cells, title="networks", right=right, wraps=wraps, notes=[note])


def data() -> Table:
    """Returns the table of datasets, with their folder."""
    cells: Cells = {"name": "name", "about": "about"}
    rows = [{"name": name, "about": entry.about} for name, entry in dcnet.data.datasets.items()]
    note = f"Folder: {dcnet.data.load.data_folder()}; change it with --data-dir or DCNET_DATA."
    return Table.of_records(rows, cells, title="datasets", wraps=("about",), notes=[note])


def recipes() -> Table:
    """Returns the table of recipes, with their main values; JSON has all values."""
    rows = [
        {"name": name, "about": first_line(made), "config": made().described(), "described": _main_values(made())}
        for name, made in training.RECIPES.items()
    ]
    cells: Cells = {"name": "name", "about": "about", "main values": "described"}
    note = "Options of `dcnet train` override every value."
    return Table.of_records(rows, cells, title="recipes", wraps=("about", "main values"), notes=[note])


def margins() -> Table:
    """Returns the table of margins, with their logits."""
    rows = [
        {
            "name": name,
            "aliases": dcnet.losses.registry.aliases_of(name),
            "about": kind.about,
            "scale": kind.scale,
            "settings": dataclasses.asdict(kind()),
        }
        for name, kind in dcnet.losses.registry.items()
    ]
    cells: Cells = {
        "name": "name",
        "also called": lambda row: ", ".join(row["aliases"]),
        "logits of the label, of others": "about",
    }
    note = (
        'In Python: dcnet.losses.MarginSoftmax(512, 100, margin="a-softmax"). Spellings such as CosFace or am_softmax '
        "are accepted; records use the name in the first column."
    )
    wraps = ("also called", "logits of the label, of others")
    return Table.of_records(rows, cells, title="margins", wraps=wraps, notes=[note])


def _main_values(config: RunConfig) -> str:
    length = f"{config.steps:,} steps" if config.steps else f"{config.epochs} epochs"
    schedule: Mapping[str, Any] = config.described()["schedule"]
    return (
        f"{config.model} on {config.dataset}, {length}, batches of {config.batch_size}, "
        f"{config.optimizer} with lr {config.lr:g}, {schedule['name']} schedule, {config.precision}"
    )


def runs(root: Path) -> Table:
    """Returns the table of runs in a folder, newest last."""
    cells: Cells = {
        "name": "name",
        "status": "status",
        "steps": _steps,
        "test, %": lambda row: _number(row["test_accuracy"], ".2f"),
        "seconds": lambda row: _number(row["seconds"], ".0f" if (row["seconds"] or 0) >= 100 else ".1f"),
        "date": lambda row: _local(row["date"]),
    }
    rows = sorted((_row(run) for run in training.all_runs(root)), key=lambda row: row["date"] or "")
    right, note = ("steps", "test, %", "seconds"), "test: accuracy at the last evaluation"
    return Table.of_records(rows, cells, title=f"runs in {root}", right=right, wraps=("name",), notes=[note])


def problems(table: Table) -> list[str]:
    """Returns an error message for each run whose record cannot be read."""
    return [row["problem"] for row in table.records if row["problem"]]


def _row(run: Run) -> Row:
    found: Row = {"name": run.folder.name, "folder": str(run.folder), "status": UNREADABLE, "problem": None}
    found |= dict.fromkeys(("steps", "steps_done", "test_accuracy", "seconds", "date"))
    try:
        return found | _run_values(run.record())
    except ValueError as error:
        return found | {"problem": str(error)}
    except (AttributeError, KeyError, TypeError) as error:
        return found | {"problem": f"{str(run.record_file)!r} is not a record of a run: {error!r}"}


def _run_values(record: Record) -> Row:
    accuracies = [value for value in record.curves.test_accuracy if value is not None]
    date = record.environment.get("date")
    if date is not None:
        datetime.fromisoformat(date)
    return {
        "status": record.status,
        "operator": record.config.get("operator"),
        "steps": record.steps,
        "steps_done": record.steps_done,
        "test_accuracy": accuracies[-1] if accuracies else None,
        "seconds": record.timings.total,
        "date": date,
    }


def _steps(row: Row) -> str:
    """Formats finished and total steps; empty for a converted network."""
    return f"{row['steps_done'] or 0}/{row['steps']}" if row["steps"] else ""


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _local(date: str | None) -> str:
    return "" if date is None else f"{datetime.fromisoformat(date).astimezone():%Y-%m-%d}"
