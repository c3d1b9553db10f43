"""Features as they lie: the numbers in loops, and the pictures."""

import math

import pytest
import torch

from dcnet.cli.app import main
from dcnet.report.features import Features, feature_plots, spread_of
from dcnet.training import Execution, Run, Trainer, recipe

SMALL = {"epochs": 1, "train_images": 60, "batch_size": 20, "width": 0.1}


def direction(points):
    total = [sum(values) for values in zip(*points, strict=True)]
    size = math.sqrt(sum(value * value for value in total))
    return [value / size for value in total]


def cosine(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def test_angles_and_scores_in_loops():
    torch.manual_seed(0)
    points, labels = torch.randn(30, 3) + 2 * torch.eye(3).repeat(10, 1), torch.arange(30) % 3
    unit = [direction([row]) for row in points.tolist()]
    means = {c: direction([u for u, label in zip(unit, labels.tolist(), strict=True) if label == c]) for c in range(3)}
    own = [cosine(u, means[label]) for u, label in zip(unit, labels.tolist(), strict=True)]
    between = [math.degrees(math.acos(cosine(means[a], means[b]))) for a in range(3) for b in range(3) if a != b]
    middle = direction(unit)
    fisher = sum(1 - c for c in own) / sum(10 * (1 - cosine(means[c], middle)) for c in range(3))
    found = spread_of(points, labels)
    assert found.within == pytest.approx(sum(math.degrees(math.acos(c)) for c in own) / 30, rel=1e-5)
    assert found.between == pytest.approx(sum(between) / len(between), rel=1e-5)
    assert found.fisher == pytest.approx(fisher, rel=1e-4)


def test_labels_need_not_be_all_there():
    points = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]])
    found = spread_of(points, torch.tensor([2, 2, 7]))
    assert (found.within, found.between) == pytest.approx((0, 90), abs=1e-4)


@pytest.mark.parametrize("count", [2, 3])
def test_a_panel_for_each_network(count):
    points, labels = torch.randn(50, count), torch.arange(50) % 4
    panels = [Features(name, points, labels, torch.eye(4, count) + 0.1) for name in ("one", "two", "three", "four")]
    figure = feature_plots(panels, ["a", "b", "c", "d"])
    assert [axes.get_title().split("\n")[0] for axes in figure.axes] == ["one", "two", "three", "four"]
    assert len(figure.axes[0].collections) == 4
    assert len(figure.axes[0].get_lines()) == 4


def test_more_features_than_can_be_drawn():
    with pytest.raises(ValueError, match="x has 512 features, of which 2 or 3 can be drawn: train with --features 2"):
        Features("x", torch.randn(5, 512), torch.arange(5))


def test_the_command(tmp_path, capsys):
    runs = []
    for margin in ("m-softmax", None):
        config = recipe("digits", **SMALL, margin=margin, features=2 if margin else None)
        runs.append(Run.of(config, tmp_path))
        Trainer(config, runs[-1], Execution(device="cpu")).run()
    assert main(["plot", "features", str(runs[0].folder)]) == 0
    assert (runs[0].folder / "features.png").exists()
    assert main(["plot", "features", str(runs[1].folder)]) == 2
    assert "can be drawn" in capsys.readouterr().err
