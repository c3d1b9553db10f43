"""Shows where numbers and charts come from: commands, runs and machines."""

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from dcnet.report.page.markup import Html, code, disclosure, join, tag
from dcnet.training import Record

# The record of a run, of a benchmark or of features.
AnyRecord = Record | Mapping[str, Any]

# Options of `dcnet bench` whose name differs from the one in the config of the record.
BENCH_OPTIONS = {"batches": "batch", "modes": "mode", "models": "model", "link_gb_per_s": "link"}
# Options that are on by default, and turned off by --no-<name>.
ON = ("fuse",)
UNKNOWN_COMMAND = "unknown: the record has no command"


def command_of(record: AnyRecord) -> str:
    """Returns the command in the record; the command of a benchmark is built from its config."""
    if record.get("command"):
        return str(record.get("command"))
    return bench_command(record) if isinstance(record, Mapping) and "benchmark" in record else UNKNOWN_COMMAND


def bench_command(record: Mapping[str, Any]) -> str:
    words = ["dcnet", "bench", str(record["benchmark"])]
    for name, value in record["config"].items():
        default = name in ON
        option = f"--{'no-' if default else ''}{BENCH_OPTIONS.get(name, name).replace('_', '-')}"
        if isinstance(value, bool):
            words += [option] if value != default else []
        elif value not in (None, []):
            words += [option, *map(str, value if isinstance(value, list) else [value])]
    return shlex.join(words)


def about(record: AnyRecord, named: bool = True) -> str:
    """Returns name, commit, date, machine and torch version, as far as the record has them."""
    environment = record.get("environment") or {}
    name = "-".join(str(record.get(key)) for key in ("name", "hash") if record.get(key))
    parts = [
        named and name and f"run {name}",
        record.get("commit") and f"commit {str(record.get('commit'))[:8]}",
        str(environment.get("date") or "")[:10],
        str(environment.get("gpu") or environment.get("cpu") or ""),
        environment.get("torch") and f"torch {environment['torch']}",
    ]
    return ", ".join(str(part) for part in parts if part)


def origin(record: AnyRecord, command: str | None = None) -> Html:
    """Returns the command (default: that in the record), followed by name, commit, date and machine."""
    return join([code(command or command_of(record)), tag("span", about(record), class_="about")])


def number(shown: str, records: Iterable[AnyRecord]) -> Html:
    """Returns a number that shows the commands that measured it, on hover or click."""
    found = list(records)
    commands = "\n".join(dict.fromkeys(command_of(record) for record in found))
    inside = tag("ul", *(tag("li", origin(record)) for record in found))
    return disclosure(shown, inside, class_="number", title=commands)


def missing_number(shown: str, command: str) -> Html:
    """Returns a placeholder for a number, with the command that measures it."""
    return disclosure(shown, tag("p", "Run ", code(command)), class_="number missing", title=command)


def commands_of(records: Iterable[AnyRecord]) -> Html:
    """Lists the commands of the records, without duplicates."""
    return listed_commands((command_of(record), record) for record in records)


def listed_commands(found: Iterable[tuple[str, AnyRecord]]) -> Html:
    """Lists the commands with their records, without duplicates; shown on click."""
    origins = {command + about(record): origin(record, command) for command, record in found}
    return disclosure("Commands that measured these numbers", tag("ul", *(tag("li", one) for one in origins.values())))


def no_records(what: str, *commands: str) -> Html:
    """Returns a note for a section without records, with the commands that create some."""
    filled = join([code(command) for command in commands], " and ")
    return tag("p", f"No records of {what}. Run ", filled, ".", class_="empty")
