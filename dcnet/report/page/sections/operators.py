"""Magnitudes and angles, which sliders move."""

import dataclasses
import math
from typing import Any, TypeVar

import torch

from dcnet import angle, magnitude
from dcnet.operator import Operator
from dcnet.part import Part
from dcnet.report.operator_plots import magnitude_values
from dcnet.report.page.charts.frame import Axis, Words, canvas, clip, color, figure, frame, legend, scales
from dcnet.report.page.charts.lines import Line, path_of
from dcnet.report.page.markup import Html, join, paragraph, tag
from dcnet.report.page.section import section
from dcnet.report.page.sources import Sources

# By the symbol of the paper: what it is called, from where to where, by which step, and where it starts.
SLIDERS = {
    "alpha": ("Scale α", 0.1, 2.0, 0.05, 1.0),  # noqa: RUF001 (the paper's symbol, and so below)
    "beta": ("Slope β", 0.0, 2.0, 0.05, 0.5),
    "rho": ("Radius ρ", 0.1, 3.0, 0.05, 1.0),  # noqa: RUF001
    "k": ("k of sigmoid", 0.05, 1.5, 0.05, 0.3),
}
NORMS = Axis("norm of the patch, ‖x‖", 0, 3)
HEIGHTS = Axis("h(‖x‖)", 0, 4)
TURNS = tuple((i * math.pi / 4, name) for i, name in enumerate(("0", "π/4", "π/2", "3π/4", "π")))
ANGLES = Axis("angle between filter and patch, θ", 0, math.pi, marks=TURNS)
ANSWERS = Axis("g(θ)", -1, 1)
POINTS = 121
Kind = TypeVar("Kind", bound=Part)


@section("Operators", order=30)
def operators(sources: Sources) -> Html:
    """All that is registered, at where the sliders start; the script draws them anew when one is moved."""
    about = paragraph(
        "The answer of a layer is h(‖x‖) · g(θ). The axes stay where they are, so that it can be seen what a constant "
        "does. β is the slope of seg beyond the radius, and the weight of the logarithm in mix; other constants are as "
        "in a new layer. A button hides a curve."
    )
    charts = tag("div", _magnitudes(), _angles(), class_="pair")
    return join([about, tag("div", _sliders(), charts, class_="operators", id="operator-curves")])


def _sliders() -> Html:
    rows = []
    for symbol, (name, low, high, step, start) in SLIDERS.items():
        key = f"slider-{symbol}"
        number = {"min": low, "max": high, "step": step, "value": start, "data_start": start}
        slider = tag("input", type="range", id=key, data_symbol=symbol, **number)
        rows.append(tag("div", tag("label", name, for_=key), slider, tag("output", f"{start:.2f}", for_=key)))
    reset = tag("button", "Back to the start", type="button", data_reset=True)
    return tag("fieldset", tag("legend", "Constants"), *rows, reset, class_="sliders")


def _magnitudes() -> Html:
    norms = torch.linspace(0, NORMS.high, POINTS)
    parts = {name: magnitude_values(_started(made()), norms) for name, made in magnitude.registry.items()}
    words = Words("chart-magnitudes", "Magnitudes", "The answer by the norm of the patch.")
    return _chart(words, (NORMS, HEIGHTS), norms, parts)


def _angles() -> Html:
    angles = torch.linspace(0, ANGLES.high, POINTS)
    parts = {name: _answers(_started(made()), angles.cos()) for name, made in angle.registry.items()}
    words = Words("chart-angles", "Angles", "The answer by the angle to the filter.")
    return _chart(words, (ANGLES, ANSWERS), angles, parts)


def _started(part: Kind) -> Kind:
    """The part with the constants that have a slider at the slider's start."""
    chosen: dict[str, Any] = {own: SLIDERS[symbol][-1] for own, symbol in part.symbols().items() if symbol in SLIDERS}
    return dataclasses.replace(part, **chosen)


def _answers(part: angle.Angle, cosines: torch.Tensor) -> torch.Tensor:
    op = Operator("sphere", part)
    return op.g(cosines, op.constants({name: slot.initial(1) for name, slot in op.learned.items()}))


def _chart(words: Words, axes: tuple[Axis, Axis], x: torch.Tensor, parts: dict[str, torch.Tensor]) -> Html:
    across, up = scales(*axes)
    # Some coincide: of two that do, the later one leaves gaps.
    dashed, curves = range(len(parts) // 2 + 1, len(parts)), []
    for i, (name, y) in enumerate(parts.items()):
        path = tag("path", d=path_of(Line(name, x.tolist(), y.tolist()), across, up))
        about = {"class_": f"series {color(i, i in dashed)}", "data_series": str(i), "data_part": name}
        curves.append(tag("g", tag("title", name), path, **about))
    # From values to places, for the script.
    places: dict[str, Any] = {
        "data_x": f"{across.low} {across.high} {across.start} {across.end}",
        "data_y": f"{up.low} {up.high} {up.start} {up.end}",
    }
    inside = tag("g", *curves, clip_path=f"url(#{words.key}-clip)")
    chart = canvas(words, clip(words), frame(*axes), inside, **places)
    return figure(words, chart, legend(words, list(parts), dashed=dashed), class_="lines")
