"""Plots of the features of several networks, on axes that include nearly all points."""

import matplotlib.colors
import pytest
import torch

from dcnet.report.feature_plots import feature_plots, reach_of
from dcnet.report.features import Features, spread_of

CLASSES = ("a", "b", "c", "d")


def panel(name="one", count=2, classes=CLASSES, **given):
    torch.manual_seed(0)
    return Features(name, torch.randn(50, count), torch.arange(50) % 4, classes, torch.eye(4, count) + 0.1, **given)


@pytest.mark.parametrize("count", [2, 3])
def test_figure_has_a_panel_per_network(count):
    names = ("one", "two", "three", "four", "five")
    figure = feature_plots([panel(name, count, accuracy=98.765) for name in names])
    assert [axes.get_title() for axes in figure.axes] == [f"{name}: 98.77 %" for name in names]
    for axes in figure.axes:
        assert len(axes.get_lines()) == 4
        assert [text.get_text() for text in axes.texts] == list(CLASSES)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(CLASSES)


def test_legend_shows_the_angles():
    shown = panel()
    legend = feature_plots([shown]).axes[0].get_legend().get_title().get_text()
    found = spread_of(shown.points, shown.labels)
    for words in (f"within a class {found.within:.1f}°", f"nearest {found.nearest:.1f}°", f"score {found.fisher:.3f}"):
        assert words in legend


def test_directions_of_classes_follow_the_weights():
    line = feature_plots([panel()]).axes[0].get_lines()[0]
    (x0, x1), (y0, y1) = line.get_data()
    assert (x0, y0) == (0, 0)
    assert y1 / x1 == pytest.approx(0.1 / 1.1)


def test_points_have_the_colors_of_their_classes():
    figure = feature_plots([panel()])
    colors = [matplotlib.colors.to_hex(dots.get_facecolor()[0]) for dots in figure.axes[0].collections]
    assert colors == [matplotlib.colors.to_hex(f"C{i}") for i in range(4)]


def test_three_features_are_drawn_on_the_sphere():
    dots = feature_plots([panel(count=3)]).axes[0].collections[-1]
    norms = torch.tensor([list(values) for values in dots._offsets3d]).norm(dim=0)
    assert norms.tolist() == pytest.approx([1.0] * len(norms))


def test_outliers_do_not_set_the_limits_of_the_axes():
    points = torch.cat([torch.ones(999, 2), torch.full((1, 2), 1000.0)])
    assert reach_of([Features("x", points, torch.arange(1000) % 2, CLASSES)]) == pytest.approx(2**0.5)


def test_networks_with_different_classes_are_rejected():
    with pytest.raises(ValueError, match="one and two have different classes: draw them one by one"):
        feature_plots([panel(), panel("two", classes=("e", "f", "g", "h"))])


def test_more_than_three_features_are_rejected():
    says = "only 2 or 3 features can be drawn, but x has 512: train with --margin softmax --features 2"
    with pytest.raises(ValueError, match=says):
        Features("x", torch.randn(5, 512), torch.arange(5), CLASSES)
