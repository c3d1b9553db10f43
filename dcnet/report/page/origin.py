"""Where a number comes from: the command that made it, and what is known of that run."""

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from dcnet.report.page.markup import Html, code, disclosure, join, tag

Record = Mapping[str, Any]

# Options of `dcnet bench` that are called otherwise than in the config of its record.
BENCH_OPTIONS = {"batches": "batch", "modes": "mode", "link_gb_per_s": "link"}


def command_of(record: Record) -> str:
    """The command of a record; that of a benchmark, which holds none, says all that its config does."""
    if record.get("command"):
        return str(record["command"])
    return bench_command(record) if "benchmark" in record else "the record does not say"


def bench_command(record: Record) -> str:
    words = ["dcnet", "bench", str(record["benchmark"])]
    for name, value in record["config"].items():
        option = f"--{BENCH_OPTIONS.get(name, name).replace('_', '-')}"
        # Heads have no operators, and no list that is empty can be given.
        if value is True:
            words.append(option)
        elif value not in (None, False, []):
            words += [option, *map(str, value if isinstance(value, list) else [value])]
    return shlex.join(words)


def about(record: Record, named: bool = True) -> str:
    """The run, its commit, its day, its machine and its torch, as far as the record has them."""
    environment = record.get("environment") or {}
    name = "-".join(str(record[key]) for key in ("name", "hash") if record.get(key))
    parts = [
        named and name and f"run {name}",
        record.get("commit") and f"commit {str(record['commit'])[:8]}",
        str(environment.get("date") or "")[:10],
        str(environment.get("gpu") or environment.get("cpu") or ""),
        environment.get("torch") and f"torch {environment['torch']}",
    ]
    return ", ".join(str(part) for part in parts if part)


def origin(record: Record, command: str | None = None) -> Html:
    """The command, that of the record unless another is given, and below it what is known of the run."""
    return join([code(command or command_of(record)), tag("span", about(record), class_="about")])


def number(shown: str, records: Iterable[Record], *more: str) -> Html:
    """A number that shows the commands behind it when it is pointed at, or opened."""
    found = list(records)
    commands = "\n".join(dict.fromkeys(command_of(record) for record in found))
    inside = tag("ul", *(tag("li", origin(record)) for record in found))
    return disclosure(shown, inside, *more, class_="number", title=commands)


def wanted(shown: str, command: str) -> Html:
    """A number that is not there, and the command that would make it."""
    inside = tag("p", "It would be made by ", code(command))
    return disclosure(shown, inside, class_="number missing", title=command)


def made_by(records: Iterable[Record]) -> Html:
    """The commands behind a picture, each once."""
    return measured_by((command_of(record), record) for record in records)


def measured_by(found: Iterable[tuple[str, Record]]) -> Html:
    """The same for what was done with a network after its training, by commands of its own."""
    origins = {command + about(record): origin(record, command) for command, record in found}
    return disclosure("Commands behind these numbers", tag("ul", *(tag("li", one) for one in origins.values())))


def nothing(what: str, *commands: str) -> Html:
    """What is said in place of a section that has no records."""
    filled = join([code(command) for command in commands], " and ")
    return tag("p", f"There are no records of {what} here. They are made by ", filled, ".", class_="empty")
