"""Sections of operators and features: curves of magnitudes and angles with sliders, and two or three features."""

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from dcnet import angle, magnitude
from dcnet.component import Component
from dcnet.report.chart import Cloud, Line, LineChart, PointChart
from dcnet.report.features import check_features
from dcnet.report.operator_plots import ANGLES, HEIGHTS, NORMS, RESPONSES, angle_values, magnitude_values
from dcnet.report.page.assembly import section
from dcnet.report.page.charts import color, figure, framed, legend, path_of, point_chart, scales
from dcnet.report.page.markup import Html, join, paragraph, tag
from dcnet.report.page.page_sources import Sources, Values
from dcnet.report.page.provenance import no_records, number

LABELS = {"alpha": "Scale α", "beta": "Slope β", "rho": "Radius ρ"}  # noqa: RUF001 (symbols of the paper)
SLIDER_STEP = 0.05
POINTS = 121
FEATURE_COMMANDS = (
    "dcnet train --recipe features --margin a-softmax",
    "dcnet plot features mnist --records results/features",
)
# The axes end at this quantile of the distances from the origin, so that a few outliers do not shrink the rest.
REACH = 0.99
# The viewpoint of the sphere for three features: rotation and elevation in radians.
TURN, TILT = 0.6, 0.4
MEAN_ANGLES = {"within": "within a class", "between": "between classes", "nearest": "to the nearest class"}
Kind = TypeVar("Kind", bound=Component)


@dataclass(frozen=True)
class Slider:
    """A slider for all constants with the same symbol."""

    label: str
    low: float
    high: float
    start: float


def sliders() -> dict[str, Slider]:
    """Returns the sliders by symbol; the first component that has limits for a symbol defines limits and start."""
    found: dict[str, Slider] = {}
    for made in (*magnitude.registry.values(), *angle.registry.values()):
        part = made()
        for name, (low, high) in part.limits().items():
            symbol = part.symbols()[name]
            label = LABELS.get(symbol, f"{symbol} of {part.name}")
            found.setdefault(symbol, Slider(label, low, high, part.slots()[name].init))
    return found


def formulas() -> str:
    """Returns JavaScript functions of n or theta and the constants, for all components that provide one."""
    magnitudes = [_formula(made(), "n") for made in magnitude.registry.values()]
    angles = [_formula(made(), "theta") for made in angle.registry.values()]
    parts = (", ".join(text for text in texts if text) for texts in (magnitudes, angles))
    return "const dcnetFormulas = {{magnitudes: {{{}}}, angles: {{{}}}}};".format(*parts)


def _formula(part: Component, variable: str) -> str | None:
    if (script := part.script()) is None:
        return None
    slots = part.slots()
    constants = [f"{symbol}: {name} = {slots[name].init!r}" for name, symbol in part.symbols().items()]
    text = f"{json.dumps(part.name)}: ({variable}, {{{', '.join(constants)}}}) => {script}"
    return text.replace("</", "<\\/")


@section("Operators", order=30, script=formulas)
def operators(sources: Sources) -> Html:
    """Draws curves of all registered magnitudes and angles, which the script redraws when a slider moves."""
    about = paragraph(
        "A layer computes h(‖x‖) · g(θ). The axes do not move with the sliders. β is the slope of seg beyond the "
        "radius, and the weight of the logarithm in mix; all other constants have the values of a new layer. The "
        "buttons hide curves."
    )
    norms, angles = torch.linspace(0, NORMS.high, POINTS), torch.linspace(0, ANGLES.high, POINTS)
    heights = {name: magnitude_values(_started(made()), norms) for name, made in magnitude.registry.items()}
    responses = {name: angle_values(_started(made()), angles.cos()) for name, made in angle.registry.items()}
    charts = (
        LineChart("Magnitudes", NORMS, HEIGHTS, _lines(norms, heights), "Output by the norm of the patch."),
        LineChart("Angles", ANGLES, RESPONSES, _lines(angles, responses), "Output by the angle to the filter."),
    )
    drawn = tag("div", *(_chart(f"chart-{chart.title.lower()}", chart) for chart in charts), class_="pair")
    return join([about, tag("div", _sliders(), drawn, class_="operators", id="operator-curves")])


def _sliders() -> Html:
    rows = []
    for symbol, slider in sliders().items():
        key, start = f"slider-{symbol}", slider.start
        number = {"min": slider.low, "max": slider.high, "step": SLIDER_STEP, "value": start, "data_start": start}
        bar = tag("input", type="range", id=key, data_symbol=symbol, **number)
        rows.append(tag("div", tag("label", slider.label, for_=key), bar, tag("output", f"{start:.2f}", for_=key)))
    reset = tag("button", "Reset", type="button", data_reset=True)
    return tag("fieldset", tag("legend", "Constants"), *rows, reset, class_="sliders")


def _started(part: Kind) -> Kind:
    """Returns the component with its constants at the start of their sliders."""
    known = sliders()
    chosen: dict[str, Any] = {name: known[symbol].start for name, symbol in part.symbols().items() if symbol in known}
    return dataclasses.replace(part, **chosen)


def _lines(x: Tensor, curves: dict[str, Tensor]) -> list[Line]:
    return [Line(name, x.tolist(), y.tolist()) for name, y in curves.items()]


def _chart(key: str, chart: LineChart) -> Html:
    across, up = scales(chart.x, chart.y)
    # Some curves coincide, so later ones are dashed.
    dashed, curves = range(len(chart.lines) // 2 + 1, len(chart.lines)), []
    for i, line in enumerate(chart.lines):
        path = tag("path", d=path_of(line, across, up))
        about = {"class_": f"series {color(i, i in dashed)}", "data_series": str(i), "data_part": line.name}
        curves.append(tag("g", tag("title", line.name), path, **about))
    # The script needs the scales from values to pixels.
    places = {
        "data_x": f"{across.low} {across.high} {across.start} {across.end}",
        "data_y": f"{up.low} {up.high} {up.start} {up.end}",
    }
    buttons = legend(key, chart.title, [line.name for line in chart.lines], dashed=dashed)
    return figure(key, chart, framed(key, chart, curves, **places), buttons, class_="lines")


@section("Features", order=40)
def features(sources: Sources) -> Html:
    """Draws a chart per record of features."""
    if not sources.features:
        return no_records("features", *FEATURE_COMMANDS)
    return tag("div", *(_features(name, record) for name, record in sources.features.items()), class_="grid")


def _features(name: str, record: Values) -> Html:
    try:
        check_features(record)
    except ValueError as error:
        raise ValueError(f"the features of the record {name!r} cannot be drawn: {error}") from None
    points = [_flat(point) for point in record["points"]]
    distances = sorted(math.hypot(*point) for point in points)
    reach = 1.2 * (distances[math.ceil(REACH * len(distances)) - 1] or 1.0)
    clouds = []
    for c, title in enumerate(record["classes"]):
        own = [point for point, label in zip(points, record["labels"], strict=True) if label == c]
        clouds.append(Cloud(str(title), own, _direction(record, c, reach / 1.2)))
    chart = PointChart(record["title"], clouds, reach, "One point per test image, colored by class.")
    return point_chart(f"features-{name}", chart, _numbers(record))


def _flat(point: list[float]) -> tuple[float, float]:
    """Returns a point in the plane; a point in space is normalized and projected."""
    if len(point) == 2:
        return point[0], point[1]
    length = math.hypot(*point) or 1.0
    x, y, z = (part / length for part in point)
    side, depth = x * math.cos(TURN) + y * math.sin(TURN), y * math.cos(TURN) - x * math.sin(TURN)
    return side, z * math.cos(TILT) - depth * math.sin(TILT)


def _direction(record: Values, c: int, reach: float) -> tuple[float, float] | None:
    if record["directions"] is None:
        return None
    direction = record["directions"][c]
    length = math.hypot(*direction) or 1.0
    x, y = _flat([part / length for part in direction])
    return (x, y) if len(direction) == 3 else (x * reach, y * reach)


def _numbers(record: Values) -> Html:
    """Lists the accuracy of the network and the angles between its features."""
    spread = record["spread"]
    rows = [("test accuracy, %", record["accuracy"], ".2f")]
    rows += [(f"mean angle {words}, °", spread[key], ".1f") for key, words in MEAN_ANGLES.items()]
    rows.append(("angular Fisher score", spread["fisher"], ".4f"))
    known = [(words, number(f"{value:{form}}", [record])) for words, value, form in rows if value is not None]
    return tag("dl", *(join([tag("dt", words), tag("dd", shown)]) for words, shown in known), class_="numbers")
