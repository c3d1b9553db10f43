"""Accuracy by the budget of an attack, or by the severity of a corruption, from the evaluations of runs."""

from collections.abc import Iterator, Sequence
from typing import Any

from dcnet.experiments import Experiment
from dcnet.report.curve_labels import labels
from dcnet.report.page.charts import Axis, Line, Words, line_chart
from dcnet.report.page.curve_groups import SHOWN
from dcnet.report.page.curves_in import curves_in
from dcnet.report.page.markup import Html, join, tag
from dcnet.report.page.measurement import Measurement
from dcnet.report.page.origin import measured_by, nothing
from dcnet.report.page.section import section
from dcnet.report.page.sources import Record, Sources
from dcnet.training.config import completed

# In %: where all networks have less there is nothing left to see.
LEFT = 0.5


@section("Robustness", order=50)
def robustness(sources: Sources) -> Html:
    """A chart for each attack on networks of one kind, with a line for each run.

    Of more lines than can be told apart, networks that were trained in other ways have a chart of their own.
    """
    charts: dict[tuple[str, tuple[str, ...], str], list[Measurement]] = {}
    for record in sources.runs:
        config = completed(record["config"])
        network = f"{config['model']} on {config['dataset']}"
        for found in _measured(record):
            charts.setdefault((network, found.curve.where, found.curve.axis), []).append(found)
    if not charts:
        return nothing("accuracy under attacks", "dcnet attack RUN", "dcnet reproduce table7 table8")
    experiments = [experiment for experiment, _ in sources.experiments]
    parts = [part for (network, *_), found in charts.items() for part in _by_training(network, found)]
    drawn = [_chart(f"robustness-{i}", network, found, experiments) for i, (network, found) in enumerate(parts)]
    return tag("div", *(tag("div", one) for one in drawn), class_="grid")


def _by_training(network: str, found: list[Measurement]) -> list[tuple[str, list[Measurement]]]:
    """What is drawn together, with the name of the networks."""
    if len(found) <= SHOWN:
        return [(network, found)]
    parts: dict[str, list[Measurement]] = {}
    for one in found:
        parts.setdefault(_training(one.record["config"]) or "trained as usual", []).append(one)
    return [(f"{network}, {trained}", members) for trained, members in parts.items()]


def _measured(record: Record) -> Iterator[Measurement]:
    """Every curve in the evaluations of a run."""
    for name, values in (record.get("evaluations") or {}).items():
        for curve in curves_in(values, (name,)):
            yield Measurement(record, name, values, curve)


def _chart(key: str, network: str, found: Sequence[Measurement], experiments: Sequence[Experiment]) -> Html:
    named = zip(found, _names(found, network), strict=True)
    lines, first = [_line(one, name) for one, name in named], found[0]
    words = Words(f"chart-{key}", f"Accuracy in % by {first.curve.axis}", first.about)
    x, y = Axis(first.curve.axis, 0, _end(lines)), Axis("accuracy, %", 0, 100)
    commands = measured_by((one.command(experiments), one.record) for one in found)
    return join([tag("h3", f"{network}: {first.title}", id=key), line_chart(words, x, y, lines, commands)])


def _names(found: Sequence[Measurement], network: str) -> list[str]:
    """Operator, adversary and seed of each run, and what else tells runs apart that have the same."""
    names = [_name(one.record["config"], network) for one in found]
    for name in {name for name in names if names.count(name) > 1}:
        places = [i for i, own in enumerate(names) if own == name]
        for i, more in zip(places, labels([[dict(found[i].record)] for i in places]), strict=True):
            names[i] = f"{name}, {more}"
    return names


def _name(config: dict[str, Any], network: str) -> str:
    """Without what the chart's title says of all of them."""
    trained = _training(config)
    told = [] if not trained or network.endswith(trained) else [trained]
    return ", ".join([completed(config)["operator"], *told, f"seed {config.get('seed', 0)}"])


def _training(config: dict[str, Any]) -> str:
    """What the network was trained with, beside the images as they are."""
    return f"trained with {config['adversary']}" if config.get("adversary") else ""


def _line(found: Measurement, name: str) -> Line:
    points = found.curve.points
    return Line(name, [x for x, _ in points], [100 * y for _, y in points], dots=True)


def _end(lines: list[Line]) -> float:
    """As far as some network is right about some image, and one point further."""
    ends = []
    for line in lines:
        over = [x for x, y in zip(line.x, line.y, strict=True) if y <= LEFT]
        ends.append(min(over, default=max(line.x)))
    return max(ends) or 1.0
