"""The section of robustness: accuracy under attacks and corruptions, from the evaluations of runs.

Accuracies in records are from 0 to 1. A curve has one of three forms: a list `epsilons` (or `severities`) and a list
`accuracies`; a mapping `by_epsilon` or `by_steps` from numbers to accuracies; or a mapping `accuracies` from
corruptions to lists with one accuracy per severity.
"""

import dataclasses
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcnet.checks import is_number
from dcnet.experiments import Experiment
from dcnet.report.chart import Axis, Line, LineChart
from dcnet.report.curves import labels
from dcnet.report.page.assembly import section
from dcnet.report.page.charts import line_chart
from dcnet.report.page.curve_sections import MAX_SHOWN
from dcnet.report.page.markup import Html, join, tag
from dcnet.report.page.page_sources import Sources
from dcnet.report.page.provenance import UNKNOWN_COMMAND, listed_commands, no_records
from dcnet.robustness.subject import QUICK, STANDARD
from dcnet.robustness.task import format_epsilon
from dcnet.training import Evaluation, Record
from dcnet.training.config import with_defaults

LISTS = {"epsilons": "epsilon", "severities": "severity"}
MAPPINGS = {"by_epsilon": "epsilon", "by_steps": "steps"}
# The chart ends where the accuracy of all networks, in %, is below this.
MIN_ACCURACY = 0.5
# Defaults of `dcnet attack`.
IMAGES, EPSILON = 1000, "8/255"
QUICK_NOTE = "Quick report: the attacks are weaker than the standard ones; do not cite these numbers."
# The measurements of `dcnet reproduce` for Tables 7 and 8.
TITLES: dict[tuple[str, ...], str] = {
    ("attacks", "by_epsilon"): "FGSM by epsilon",
    ("attacks", "by_steps"): "BIM by steps",
}


@dataclass(frozen=True)
class EvaluationCurve:
    """A curve in an evaluation: the path of keys to it, the name of the x axis, and the points from left to right."""

    where: tuple[str, ...]
    axis: str
    points: tuple[tuple[float, float], ...]

    @property
    def name(self) -> str:
        return " ".join(self.where).replace("_", " ")


def curves_in(value: Any, where: tuple[str, ...] = ()) -> Iterator[EvaluationCurve]:
    """Yields all curves in a JSON value, at any depth."""
    if not isinstance(value, Mapping):
        return
    accuracies: Any = value.get("accuracies")
    for key, axis in LISTS.items():
        if _numbers(value.get(key)) and _numbers(accuracies):
            yield _curve(where, axis, zip(value[key], accuracies, strict=False))
    if isinstance(accuracies, Mapping):
        for kind, found in accuracies.items():
            if _numbers(found):
                yield _curve((*where, kind), "severity", enumerate(found, start=1))
    for key, part in value.items():
        if key in MAPPINGS and _by_number(part):
            yield _curve((*where, key), MAPPINGS[key], ((float(at), found) for at, found in part.items()))
        else:
            yield from curves_in(part, (*where, key))


def _curve(where: Sequence[str], axis: str, points: Any) -> EvaluationCurve:
    return EvaluationCurve(tuple(where), axis, tuple(sorted((float(x), float(y)) for x, y in points)))


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_number, value))


def _by_number(value: Any) -> bool:
    if not isinstance(value, Mapping) or not value or not all(map(is_number, value.values())):
        return False
    try:
        return all(float(key) >= 0 for key in value)
    except ValueError:
        return False


@dataclass(frozen=True)
class Measurement:
    """A curve in an evaluation of a run; `name` is the name of the evaluation in the record."""

    record: Record
    name: str
    values: Evaluation
    curve: EvaluationCurve

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of `dcnet attack`; empty for other evaluations."""
        found = self.values.settings
        return found if {"epsilon", "images"} <= found.keys() else {}

    @property
    def title(self) -> str:
        where = self.curve.where
        if self.settings and "by_epsilon" in where:
            return "PGD by epsilon"
        if self.settings and "corrupted" in where:
            return f"corrupted by {where[-1].replace('_', ' ')}"
        return TITLES.get(where) or self.curve.name

    @property
    def about(self) -> str:
        """A description of the images and the strength of the attack, with a note if it is weak."""
        images = self.settings.get("images", self.values.get("images"))
        on = f"On {images:,} perturbed test images" if isinstance(images, int) else "On perturbed test images"
        steps = self.settings.get("steps") if "by_epsilon" in self.curve.where else None
        how = f", {steps} steps per epsilon" if steps else ""
        within = self.values.get("epsilon") if self.curve.axis == "steps" else None
        budget = f", within {format_epsilon(within)} of each pixel" if isinstance(within, float) else ""
        return f"{on}{how}{budget}; evaluation {self.name!r} in the records." + (f" {QUICK_NOTE}" if self.weak else "")

    @property
    def weak(self) -> bool:
        """Whether the attacks have less than the standard effort; corruptions do not depend on the effort."""
        attacked = bool(self.settings) and "corrupted" not in self.curve.where
        return attacked and self._effort() != dataclasses.asdict(STANDARD)

    def command(self, experiments: Iterable[Experiment]) -> str:
        """Returns the command in the record, or else one of `dcnet attack` or `dcnet reproduce` that measures this."""
        if isinstance(self.values.command, str):
            return self.values.command
        if self.settings:
            return self._attack_command()
        users = [one for one in experiments if any(cell.evaluation == self.name for cell in one.cells)]
        # A hunt evaluates many more networks than a table.
        names = [one.name for one in users if not one.hunt] or [one.name for one in users]
        return shlex.join(["dcnet", "reproduce", *names]) if names else UNKNOWN_COMMAND

    def _attack_command(self) -> str:
        """Returns the `dcnet attack` command with all options that differ from their default."""
        words = ["dcnet", "attack", self.record.run_name]
        if self.settings["images"] != IMAGES:
            words += ["--images", str(self.settings["images"])]
        if (epsilon := format_epsilon(self.settings["epsilon"], exact=True)) != EPSILON:
            words += ["--epsilon", epsilon]
        source = ((self.values.results or {}).get("transfer") or {}).get("source") or {}
        words += ["--source", str(source["run"])] if source.get("run") else []
        return shlex.join([*words, *(["--quick"] if self._effort() == dataclasses.asdict(QUICK) else [])])

    def _effort(self) -> dict[str, Any]:
        return {field.name: self.settings.get(field.name) for field in dataclasses.fields(STANDARD)}


@section("Robustness", order=50)
def robustness(sources: Sources) -> Html:
    """Draws a chart per network and measurement, with a line per run.

    With too many lines, there is a chart per type of training.
    """
    charts: dict[tuple[str, tuple[str, ...], str], list[Measurement]] = {}
    for record in sources.runs:
        network = f"{record.settings['model']} on {record.settings['dataset']}"
        for found in _measurements(record):
            charts.setdefault((network, found.curve.where, found.curve.axis), []).append(found)
    if not charts:
        return no_records("accuracy under attacks", "dcnet attack RUN", "dcnet reproduce table7 table8")
    experiments = [experiment for experiment, _ in sources.experiments]
    parts = [part for (network, *_), found in charts.items() for part in _by_training(network, found)]
    drawn = [_chart(f"robustness-{i}", network, found, experiments) for i, (network, found) in enumerate(parts)]
    return tag("div", *(tag("div", one) for one in drawn), class_="grid")


def _by_training(network: str, found: list[Measurement]) -> list[tuple[str, list[Measurement]]]:
    if len(found) <= MAX_SHOWN:
        return [(network, found)]
    parts: dict[str, list[Measurement]] = {}
    for one in found:
        parts.setdefault(_adversary(one.record.config) or "standard training", []).append(one)
    return [(f"{network}, {trained}", members) for trained, members in parts.items()]


def _measurements(record: Record) -> Iterator[Measurement]:
    for name, values in record.evaluations.items():
        for curve in curves_in(values.to_json(), (name,)):
            yield Measurement(record, name, values, curve)


def _chart(key: str, network: str, found: Sequence[Measurement], experiments: Sequence[Experiment]) -> Html:
    lines = [_line(one, name) for one, name in zip(found, _names(found, network), strict=True)]
    first = found[0]
    x, y = Axis(first.curve.axis, 0, _end(lines)), Axis("accuracy, %", 0, 100)
    commands = listed_commands((one.command(experiments), one.record) for one in found)
    chart = LineChart(f"Accuracy in % by {first.curve.axis}", x, y, lines, first.about)
    return join([tag("h3", f"{network}: {first.title}", id=key), line_chart(f"chart-{key}", chart, commands)])


def _names(found: Sequence[Measurement], network: str) -> list[str]:
    """Returns operator, adversary and seed of each run, and more settings if these are equal for several runs."""
    names = [_name(one.record.config, network) for one in found]
    for name in {name for name in names if names.count(name) > 1}:
        places = [i for i, own in enumerate(names) if own == name]
        for i, more in zip(places, labels([[found[i].record] for i in places]), strict=True):
            names[i] = f"{name}, {more}"
    return names


def _name(config: dict[str, Any], network: str) -> str:
    """Returns the name of a line, without the adversary if it is in the title of the chart."""
    trained = _adversary(config)
    shown = [] if not trained or network.endswith(trained) else [trained]
    return ", ".join([with_defaults(config)["operator"], *shown, f"seed {config.get('seed', 0)}"])


def _adversary(config: dict[str, Any]) -> str:
    return f"trained with {config['adversary']}" if config.get("adversary") else ""


def _line(found: Measurement, name: str) -> Line:
    points = found.curve.points
    return Line(name, [x for x, _ in points], [100 * y for _, y in points], dots=True)


def _end(lines: list[Line]) -> float:
    """Returns the end of the x axis: where all accuracies have dropped to `MIN_ACCURACY`, or the last point."""
    ends = []
    for line in lines:
        over = [x for x, y in zip(line.x, line.y, strict=True) if y <= MIN_ACCURACY]
        ends.append(min(over, default=max(line.x)))
    return max(ends) or 1.0
