"""Which runs are drawn in one chart: those of Figure 4, of a table, and of a network on a dataset."""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dcnet.experiments.experiment import ERROR, Cell, Experiment
from dcnet.operator import is_plain
from dcnet.report.curve_labels import labels, mean_of
from dcnet.report.page.cells import Found
from dcnet.report.page.sources import Sources, free
from dcnet.training.config import completed
from dcnet.training.summary import grouped

Record = dict[str, Any]
FIGURE_4 = "table4"
# More lines than that hide each other.
SHOWN = 8


@dataclass(frozen=True)
class CurveGroup:
    """One chart: a label for each line, with the runs that it is the mean of."""

    key: str
    title: str
    lines: tuple[tuple[str, tuple[Record, ...]], ...]

    @property
    def records(self) -> list[Record]:
        return [record for _, members in self.lines for record in members]


def curve_groups(sources: Sources) -> list[CurveGroup]:
    """Figure 4, which has the runs of Table 4, then the other tables of test errors, then all other runs."""
    found = {experiment.name: (experiment, cells) for experiment, cells in sources.experiments}
    first = [record for cell in found.pop(FIGURE_4)[1] for record in cell.records if record["curves"].get("step")]
    groups = [_by_difference("figure4", "Figure 4: ResNet-32 on CIFAR-100, plain and decoupled", first)]
    for experiment, cells in found.values():
        if all(cell.metric == ERROR for cell in experiment.cells):
            groups += _of_a_table(experiment, cells, {_name(one) for group in groups for one in group.records})
    drawn, rest = {_name(one) for group in groups for one in group.records}, dict[tuple[str, str], list[Record]]()
    for record in sources.curves:
        if _name(record) not in drawn:
            config = completed(record["config"])
            rest.setdefault((config["model"], config["dataset"]), []).append(record)
    groups += [_by_difference(_key(*place), " on ".join(place), records) for place, records in rest.items()]
    return _apart(groups)


def _apart(groups: Iterable[CurveGroup]) -> list[CurveGroup]:
    """Each with a key of its own: of names that differ in their signs alone, buttons would move one chart for two."""
    found: dict[str, CurveGroup] = {}
    for group in groups:
        key = free(group.key, found)
        found[key] = dataclasses.replace(group, key=key)
    return list(found.values())


def _of_a_table(experiment: Experiment, cells: Sequence[Found], drawn: set[str]) -> Iterable[CurveGroup]:
    """One chart; of more lines than can be seen one for each column, or for each row where that makes fewer."""
    lines = [(cell.status.cell, runs) for cell in cells if (runs := _new(cell.records, drawn))]
    title = experiment.title.split(":")[0]
    if not lines:
        return
    if len(lines) <= SHOWN:
        yield _chart(experiment.name, title, [(f"{cell.row}, {cell.column}", runs) for cell, runs in lines])
        return
    by_rows = len(experiment.rows) < len(experiment.columns)
    for part in experiment.rows if by_rows else experiment.columns:
        own = [(_other(cell, by_rows), runs) for cell, runs in lines if part == _other(cell, not by_rows)]
        if own:
            yield _chart(_key(part, experiment.name), f"{title}: {part}", own)


def _other(cell: Cell, by_rows: bool) -> str:
    """What tells a cell from the others of its row, or of its column."""
    return cell.column if by_rows else cell.row


def _new(records: Iterable[Record], drawn: set[str]) -> tuple[Record, ...]:
    return tuple(record for record in records if record["curves"].get("step") and _name(record) not in drawn)


def _chart(key: str, title: str, lines: Sequence[tuple[str, tuple[Record, ...]]]) -> CurveGroup:
    return CurveGroup(key, title, tuple((name + mean_of(members), members) for name, members in lines))


def _by_difference(key: str, title: str, records: Sequence[Record]) -> CurveGroup:
    groups = sorted((tuple(members) for members in grouped(records).values()), key=_place)
    names = labels(groups) if groups else []
    return CurveGroup(key, title, tuple(zip(names, groups, strict=True)))


def _place(members: Sequence[Record]) -> tuple[bool, bool]:
    """Plain networks first, and then those that differ in the magnitude alone."""
    operator = completed(members[0]["config"])["operator"]
    return not is_plain(operator), not operator.endswith("-cos")


def _name(record: Record) -> str:
    return f"{record['name']}-{record['hash']}"


def _key(first: str, second: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in f"{second}-{first}")
