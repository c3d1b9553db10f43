"""All runs with their commands, which is what can be read on paper, too."""

from typing import Any

from dcnet.report.page.markup import Html, code, join, paragraph, table
from dcnet.report.page.origin import about, command_of, nothing
from dcnet.report.page.section import section
from dcnet.report.page.sources import Sources

HEADINGS = ("run", "status", "error, %", "steps", "command", "made")


@section("Records", order=90)
def records(sources: Sources) -> Html:
    """A row for each run, and one for each benchmark and set of features."""
    others = sources.benchmarks | sources.features
    if not sources.runs and not others:
        return nothing("anything", "dcnet train", "dcnet report")
    runs = [_run(record) for record in sources.runs]
    rest = [[name, "done", "", "", *_made(record)] for name, record in others.items()]
    intro = paragraph("The command of a benchmark is spelled from the config in its record.")
    return join([table("records-table", "What this page is made of", HEADINGS, [*runs, *rest]), intro])


def _run(record: dict[str, Any]) -> list[str]:
    error = (record.get("results") or {}).get("test_error")
    shown = "" if error is None else f"{error:.2f}"
    steps = f"{record['steps']:,}" if record.get("steps") else ""
    name = f"{record['name']}-{record['hash']}"
    return [name, record["status"], shown, steps, *_made(record)]


def _made(record: dict[str, Any]) -> list[str]:
    return [code(command_of(record)), about(record, named=False)]
