"""Reports on pairs, kept in the record of the run, and what they take the place of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcnet.cli.embedding import Comparer
    from dcnet.cli.pair_options import Listed

# What tells the pairs of two reports apart that have the same name.
TELLING = ("list_file", "images", "pairs", "same", "files")


@dataclass(frozen=True)
class Kept:
    """What was done with a report: a line for people, and for machines what it took the place of, if anything."""

    line: str
    values: dict[str, Any] = field(default_factory=dict)


def keep(comparer: Comparer, listed: Listed, values: dict[str, Any]) -> Kept:
    """Puts the report into the record of the run, and says so; a run that one may only read is reported on as well."""
    from dcnet.training import add_evaluation

    name = listed.name + ("" if values["flip"] else "-no-flip")
    try:
        before = _replaced(comparer.run.record().get("evaluations", {}).get(name), listed.about)
        add_evaluation(comparer.run, name, {key: value for key, value in values.items() if key != "run"})
    except (OSError, ValueError) as error:
        return Kept(f"note: the report is not kept in the record: {error}")
    line = f"kept in {comparer.run.record_file} as {name!r}"
    if before is None:
        return Kept(line)
    other = f"{before.get('pairs')} other pairs, of {before.get('list_file', before.get('list'))}"
    return Kept(f"{line}, in place of a report on {other}", {"replaced": before})


def _replaced(report: Any, about: dict[str, Any]) -> dict[str, Any] | None:
    """The pairs of the report that the record has by that name; None if it has none, or one on the same pairs."""
    before = report.get("data") if isinstance(report, dict) else None
    if not isinstance(before, dict) or all(before.get(key, about[key]) == about[key] for key in TELLING):
        return None
    return before
