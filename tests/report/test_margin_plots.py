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


def test_the_command(tmp_path, capsys):
    assert main(["plot", "margins", "--margins", "a-softmax", "arcface", "--out", str(tmp_path / "x.svg")]) == 0
    assert (tmp_path / "x.svg").exists()
    capsys.readouterr()
    for wrong, words in ((["--margins", "arcfce"], "did you mean 'arcface'"), (["--m", "0.5"], "must be 1 or more")):
        assert main(["plot", "margins", *wrong, "--out", str(tmp_path / "y.svg")]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "y.svg").exists()
