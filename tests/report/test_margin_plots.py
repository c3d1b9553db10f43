"""Margins as curves."""

import math

import pytest

from dcnet.cli.app import main
from dcnet.losses import registry
from dcnet.report.margin_plots import EASINGS, margin_curves


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


def test_slopes_are_those_of_the_gradient():
    _, _, right = margin_curves(["m-softmax", "sphereface-r"]).axes
    slopes = lines(right)
    assert slopes["m-softmax"][360] == pytest.approx(1)
    assert slopes["sphereface-r"] == pytest.approx(slopes["m-softmax"], abs=1e-6)


def test_margins_of_one_name_are_told_apart(tmp_path, monkeypatch):
    """By their specs, each of which is drawn once however it is written."""
    from dcnet.report import margin_plots

    drawn = []
    monkeypatch.setattr(margin_plots, "margin_curves", lambda *given: drawn.append(margin_curves(*given)) or drawn[-1])
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


def test_the_command(tmp_path, capsys):
    assert main(["plot", "margins", "--margins", "a-softmax", "arcface", "--out", str(tmp_path / "x.svg")]) == 0
    assert (tmp_path / "x.svg").exists()
    capsys.readouterr()
    for wrong, words in ((["--margins", "arcfce"], "did you mean 'arcface'"), (["--m", "0.5"], "must be 1 or more")):
        assert main(["plot", "margins", *wrong, "--out", str(tmp_path / "y.svg")]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "y.svg").exists()
