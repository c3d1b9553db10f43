"""The pictures show every registered part, and reach the disk whole or not at all."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from dcnet import angle, magnitude
from dcnet.report import plots


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
    left, right = plots.operator_curves().axes
    assert names(left) == list(magnitude.registry)
    assert names(right) == list(angle.registry)


def test_operator_curves_have_titles_labels_and_legends():
    for axes in plots.operator_curves().axes:
        assert axes.get_title()
        assert axes.get_xlabel()
        assert axes.get_ylabel()
        assert axes.get_legend() is not None


def test_magnitudes_are_drawn_at_radius_one():
    left, _ = plots.operator_curves().axes
    for name, expected in {"tanh": math.tanh, "ball": lambda n: min(n, 1), "log": math.log1p}.items():
        assert curve(left, name)[1] == pytest.approx([expected(n) for n in curve(left, name)[0]], abs=1e-6)


@pytest.mark.parametrize("name", ["cos", "spline"])
def test_angles_are_drawn_over_the_angle(name: str):
    _, right = plots.operator_curves().axes
    thetas, values = curve(right, name)
    assert thetas[0] == 0
    assert thetas[-1] == pytest.approx(math.pi)
    assert values == pytest.approx([math.cos(theta) for theta in thetas], abs=1e-6)


def test_a_new_magnitude_appears_by_itself(cube: str):
    assert cube in names(plots.operator_curves().axes[0])
    assert cube in [axes.get_title() for axes in plots.geometry().axes]


def test_geometry_has_one_panel_for_each_magnitude_and_one_legend():
    figure = plots.geometry()
    titles = [axes.get_title().split(" ")[0] for axes in figure.axes if axes.axison]
    assert titles == list(magnitude.registry)
    assert len(figure.legends) == 1


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("A.PNG", b"\x89PNG")])
def test_save_writes_the_format_of_the_suffix_into_a_new_folder(name: str, start: bytes, tmp_path: Path):
    path = tmp_path / "new" / "folder" / name
    plots.save(Figure(), path)
    assert path.read_bytes().startswith(start)
    assert list(path.parent.iterdir()) == [path]


def test_save_gives_the_same_svg_again(tmp_path: Path):
    for name in ("a.svg", "b.svg"):
        plots.save(plots.operator_curves(), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_save_refuses_an_unknown_suffix_and_writes_nothing(tmp_path: Path):
    with pytest.raises(ValueError, match=r"\.png or \.svg, not as '\.xyz'"):
        plots.save(Figure(), tmp_path / "a.xyz")
    assert not list(tmp_path.iterdir())


def test_a_save_that_fails_leaves_the_old_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise OSError("disk full")

    path = tmp_path / "a.png"
    path.write_bytes(b"old")
    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        plots.save(Figure(), path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_command_writes_both_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    # Away from the records of features, which would have pictures, too.
    monkeypatch.chdir(tmp_path)
    plots.main([str(tmp_path)])
    assert {path.name for path in tmp_path.iterdir()} == {"operators.png", "geometry.png"}
    assert "operators.png" in capsys.readouterr().out
