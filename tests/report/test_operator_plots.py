"""Plots of operators and margins."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import pytest
from matplotlib.axes import Axes
from torch import Tensor

from dcnet import angle, magnitude
from dcnet.cli.app import main
from dcnet.losses import registry
from dcnet.report.operator_plots import EASINGS, geometry, margin_curves, operator_curves


@pytest.fixture
def cube() -> Iterator[str]:
    """A magnitude that is registered for one test."""

    @magnitude.register
    @dataclass(frozen=True)
    class Cube(magnitude.Magnitude):
        name: ClassVar[str] = "cube"
        equation: ClassVar[str] = "{n}^3"

        def value(self, n: Tensor) -> Tensor:
            return n**3

    yield "cube"
    del magnitude.registry["cube"]


def names(axes: Axes) -> list[str]:
    return [str(line.get_label()).split(" ")[0] for line in axes.get_lines()]


def curve(axes: Axes, name: str) -> tuple[list[float], list[float]]:
    line = axes.get_lines()[names(axes).index(name)]
    return list(line.get_xdata()), list(line.get_ydata())


def test_operator_curves_show_one_line_for_each_part():
    left, right = operator_curves().axes
    assert names(left) == list(magnitude.registry)
    assert names(right) == list(angle.registry)


def test_operator_curves_have_titles_labels_and_legends():
    for axes in operator_curves().axes:
        assert axes.get_title()
        assert axes.get_xlabel()
        assert axes.get_ylabel()
        assert axes.get_legend() is not None


def test_magnitudes_are_drawn_at_radius_one():
    left, _ = operator_curves().axes
    for name, expected in {"tanh": math.tanh, "ball": lambda n: min(n, 1), "log": math.log1p}.items():
        assert curve(left, name)[1] == pytest.approx([expected(n) for n in curve(left, name)[0]], abs=1e-6)


@pytest.mark.parametrize("name", ["cos", "spline"])
def test_angles_are_drawn_over_the_angle(name: str):
    _, right = operator_curves().axes
    thetas, values = curve(right, name)
    assert thetas[0] == 0
    assert thetas[-1] == pytest.approx(math.pi)
    assert values == pytest.approx([math.cos(theta) for theta in thetas], abs=1e-6)


def test_registered_magnitude_appears_in_the_plots(cube: str):
    assert cube in names(operator_curves().axes[0])
    assert cube in [axes.get_title() for axes in geometry().axes]


def test_geometry_has_one_panel_for_each_magnitude_and_one_legend():
    figure = geometry()
    titles = [axes.get_title().split(" ")[0] for axes in figure.axes if axes.axison]
    assert titles == list(magnitude.registry)
    assert len(figure.legends) == 1


def curves(axes: Axes) -> dict[str, tuple[list[float], list[float]]]:
    return {str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}


def test_magnitudes_and_angles_that_operators_share_are_drawn_once():
    left, right = operator_curves(["conv", "tanh-cos", "tanh-sqcos", "seg(slope=0.2)-cos+linear"]).axes
    assert list(curves(left)) == ["conv, plain", "tanh", "seg(slope=0.2)+linear"]
    assert list(curves(right)) == ["cos", "sqcos"]


def test_curves_match_the_equations():
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


def lines(axes):
    return {line.get_label().split(",")[0]: line.get_ydata() for line in axes.get_lines()}


def test_every_margin_is_drawn_from_0_to_pi():
    left, middle, right = margin_curves().axes
    assert list(lines(left)) == list(lines(right)) == list(registry)
    assert left.get_lines()[0].get_xdata()[-1] == pytest.approx(math.pi)
    psi = lines(left)
    assert (psi["a-softmax"][0], psi["a-softmax"][-1]) == pytest.approx((1, -7))
    assert psi["am-softmax"][360] == pytest.approx(-0.35)
    assert len(middle.get_lines()) == len(EASINGS)
    assert middle.get_lines()[-1].get_ydata() == pytest.approx(psi["a-softmax"])


def test_slopes_match_the_gradient():
    _, _, right = margin_curves(["m-softmax", "sphereface-r"]).axes
    slopes = lines(right)
    assert slopes["m-softmax"][360] == pytest.approx(1)
    assert slopes["sphereface-r"] == pytest.approx(slopes["m-softmax"], abs=1e-6)


def test_margins_of_one_name_are_labeled_by_their_specs(tmp_path, monkeypatch):
    """Each spec is drawn once, in any spelling."""
    from dcnet.report import operator_plots

    drawn = []
    monkeypatch.setattr(
        operator_plots, "margin_curves", lambda *given: drawn.append(margin_curves(*given)) or drawn[-1]
    )
    specs = ["a-softmax(m=2)", "a-softmax(m=3)", "a-softmax( m = 2 )", "a-softmax", "a-softmax(m=4)", "normface"]
    specs += ["sphereface-r(version=2)", "sphereface-r"]
    assert main(["plot", "margins", "--margins", *specs, "--out", str(tmp_path / "x.svg")]) == 0
    left, *_ = drawn[0].axes
    found = {line.get_label(): line.get_ydata()[-1] for line in left.get_lines()}
    labels = ["a-softmax(m=2)", "a-softmax(m=3)", "a-softmax, m = 4", "normface"]
    assert list(found) == [*labels, "sphereface-r(version=2)", "sphereface-r, m = 1.5"]
    # psi ends at 1 - 2m.
    assert [found[label] for label in labels] == pytest.approx([-3, -5, -7, -1])
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == list(found)


def test_plot_margins_command(tmp_path, capsys):
    assert main(["plot", "margins", "--margins", "a-softmax", "arcface", "--out", str(tmp_path / "x.svg")]) == 0
    assert (tmp_path / "x.svg").exists()
    capsys.readouterr()
    for wrong, words in ((["--margins", "arcfce"], "did you mean 'arcface'"), (["--m", "0.5"], "must be in [1, 1000]")):
        assert main(["plot", "margins", *wrong, "--out", str(tmp_path / "y.svg")]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "y.svg").exists()
