"""Operators of one's own choice as curves."""

import math

import pytest
from matplotlib.axes import Axes

from dcnet.report.operator_plots import operator_curves


def curves(axes: Axes) -> dict[str, tuple[list[float], list[float]]]:
    return {str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}


def test_magnitudes_and_angles_that_operators_share_are_drawn_once():
    left, right = operator_curves(["conv", "tanh-cos", "tanh-sqcos", "seg(slope=0.2)-cos+linear"]).axes
    assert list(curves(left)) == ["conv, plain", "tanh", "seg(slope=0.2)+linear"]
    assert list(curves(right)) == ["cos", "sqcos"]


def test_the_curves_are_the_equations():
    left, right = operator_curves(["conv", "tanh(radius=2.0)-cos+product", "linear&log-sqcos"]).axes
    expected = {
        "conv, plain": lambda n: n,
        "tanh(radius=2.0)+product": lambda n: math.tanh(0.5) * math.tanh(n / 2),
        "linear&log": lambda n: n + math.log1p(n),
    }
    for name, (norms, values) in curves(left).items():
        assert values == pytest.approx([expected[name](n) for n in norms], abs=1e-6)
    angles, values = curves(right)["sqcos"]
    assert values == pytest.approx([math.copysign(math.cos(t) ** 2, math.cos(t)) for t in angles], abs=1e-6)
