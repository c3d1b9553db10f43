"""The section of training curves: test error by step for Figure 4, for the tables, and for all other runs."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dcnet.data.cifar import VALIDATION
from dcnet.experiments.experiment import ERROR, Cell, Experiment
from dcnet.operator import is_plain
from dcnet.report.chart import Axis, Line, LineChart
from dcnet.report.curves import figure4_records, is_refreshed, labels, mean_curve, mean_of
from dcnet.report.page.assembly import section
from dcnet.report.page.charts import line_chart
from dcnet.report.page.markup import Html, join, paragraph, tag
from dcnet.report.page.page_sources import CellResult, Sources, unique_name
from dcnet.report.page.provenance import commands_of, no_records
from dcnet.training import Record
from dcnet.training.session import group_by_seed

FIGURE_4 = "table4"
# The largest number of distinguishable lines; all others are hidden at first.
MAX_SHOWN = 8
# The limits of the axis ignore the first steps, up to this fraction of the run.
EARLY = 0.08


@dataclass(frozen=True)
class CurveGroup:
    """A chart: its lines, each with a label and the runs that it is the mean of."""

    key: str
    title: str
    lines: tuple[tuple[str, tuple[Record, ...]], ...]

    @property
    def records(self) -> list[Record]:
        return [record for _, members in self.lines for record in members]


@section("Training curves", order=20)
def curves(sources: Sources) -> Html:
    """Draws Figure 4, then the charts of tables, then a chart per dataset and network of all other runs."""
    return tag("div", *(tag("div", _chart(group)) for group in curve_groups(sources)), class_="grid")


def _chart(group: CurveGroup) -> Html:
    heading = tag("h3", group.title, id=f"curves-{group.key}")
    if not group.lines:
        return join([heading, no_records("these runs", f"dcnet reproduce {FIGURE_4}")])
    refreshed = all(is_refreshed(record) for record in group.records)
    curve = "refreshed_error" if refreshed else "test_error"
    lines = [line for name, members in group.lines if (line := _line(name, members, curve)).x]
    if not lines:
        return join([heading, paragraph("No evaluation of these runs has a finite error.")])
    held_out = all(record.config.get("dataset") == VALIDATION for record in group.records)
    what = "validation error" if held_out else "test error"
    several = max(len(members) for _, members in group.lines) > 1
    steps = Axis("step", 0, max(max(line.x) for line in lines))
    about = "Mean over seeds." if several else "One seed each."
    about += " Statistics refreshed before each evaluation." if refreshed else ""
    chart = LineChart(f"{what.capitalize()} in % by step", steps, _error_axis(f"{what}, %", lines), lines, about)
    shown = MAX_SHOWN if len(lines) > MAX_SHOWN else None
    return join([heading, line_chart(f"chart-{group.key}", chart, commands_of(group.records), shown)])


def _line(name: str, members: Sequence[Record], curve: str) -> Line:
    """Returns a line of the mean error over the seeds that reached a step."""
    error = mean_curve(members, curve, by="step")
    return Line(name, error.x, error.mean)


def _error_axis(name: str, lines: Sequence[Line]) -> Axis:
    whole = [value for line in lines for value in line.y]
    late = [value for line in lines for at, value in zip(line.x, line.y, strict=True) if at >= EARLY * max(line.x)]
    step = 5 if max(late) - min(whole) > 15 else 1
    low = min(math.floor(min(whole) / step) * step, 100 - step)
    return Axis(name, max(0, low), min(100, max(math.ceil(max(late) / step) * step, low + step)))


def curve_groups(sources: Sources) -> list[CurveGroup]:
    """Returns the charts of Figure 4 (the runs of Table 4), of the other tables of test errors, and of other runs."""
    found = {experiment.name: (experiment, cells) for experiment, cells in sources.experiments}
    first = figure4_records(record for cell in found.pop(FIGURE_4)[1] for record in cell.records)
    groups = [_by_difference("figure4", "Figure 4: ResNet-32 on CIFAR-100, plain and decoupled", first)]
    for experiment, cells in found.values():
        if all(cell.metric == ERROR for cell in experiment.cells):
            groups += _groups_of(experiment, cells, {one.run_name for group in groups for one in group.records})
    drawn = {one.run_name for group in groups for one in group.records}
    rest: dict[tuple[str, str], list[Record]] = {}
    for record in sources.curves:
        if record.run_name not in drawn:
            rest.setdefault((record.settings["model"], record.settings["dataset"]), []).append(record)
    groups += [_by_difference(_key(*place), " on ".join(place), records) for place, records in rest.items()]
    return _with_unique_keys(groups)


def _with_unique_keys(groups: Iterable[CurveGroup]) -> list[CurveGroup]:
    """Makes keys unique, since they have only the letters and digits of names and may coincide."""
    found: dict[str, CurveGroup] = {}
    for group in groups:
        key = unique_name(group.key, found)
        found[key] = dataclasses.replace(group, key=key)
    return list(found.values())


def _groups_of(experiment: Experiment, cells: Sequence[CellResult], drawn: set[str]) -> Iterable[CurveGroup]:
    """Yields one chart per table; with too many lines, one per column, or per row if there are fewer rows."""
    lines = [(cell.status.cell, runs) for cell in cells if (runs := _new(cell.records, drawn))]
    title = experiment.title.split(":")[0]
    if not lines:
        return
    if len(lines) <= MAX_SHOWN:
        yield _group(experiment.name, title, [(f"{cell.row}, {cell.column}", runs) for cell, runs in lines])
        return
    by_rows = len(experiment.rows) < len(experiment.columns)
    for part in experiment.rows if by_rows else experiment.columns:
        own = [(_label(cell, by_rows), runs) for cell, runs in lines if part == _label(cell, not by_rows)]
        if own:
            yield _group(_key(part, experiment.name), f"{title}: {part}", own)


def _label(cell: Cell, by_rows: bool) -> str:
    return cell.column if by_rows else cell.row


def _new(records: Iterable[Record], drawn: set[str]) -> tuple[Record, ...]:
    return tuple(record for record in records if record.curves.step and record.run_name not in drawn)


def _group(key: str, title: str, lines: Sequence[tuple[str, tuple[Record, ...]]]) -> CurveGroup:
    return CurveGroup(key, title, tuple((name + mean_of(members), members) for name, members in lines))


def _by_difference(key: str, title: str, records: Sequence[Record]) -> CurveGroup:
    """Returns a chart whose labels are the differences between the runs."""
    groups = sorted((tuple(members) for members in group_by_seed(records).values()), key=_order)
    names = labels(groups) if groups else []
    return CurveGroup(key, title, tuple(zip(names, groups, strict=True)))


def _order(members: Sequence[Record]) -> tuple[bool, bool]:
    """Returns a sort key: plain networks first, then operators with a cosine."""
    operator = members[0].settings["operator"]
    return not is_plain(operator), not operator.endswith("-cos")


def _key(first: str, second: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in f"{second}-{first}")
