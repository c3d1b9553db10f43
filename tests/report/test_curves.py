"""Training curves: mean and band over seeds, distinct labels, and drops of the learning rate."""

import dataclasses
import math
from typing import Any

import pytest
from matplotlib.axes import Axes

from dcnet.data import Augmentation
from dcnet.report.curves import common_words, figure4_records, labels, run_curves
from dcnet.training import Record, recipe
from dcnet.training.schedules import Steps
from dcnet.training.session import group_by_seed


def record(accuracies: list[float | None], losses: list[float | None] | None = None, **changes: Any) -> Record:
    """A run of the digits with these curves."""
    config = recipe(changes.pop("recipe", "digits"), **changes)
    count = len(accuracies)
    curves = {
        "step": [20 * i for i in range(1, count + 1)],
        "epoch": [float(i) for i in range(1, count + 1)],
        "test_accuracy": accuracies,
        "train_loss": losses or [1.0] * count,
        "learning_rate": [config.lr * config.schedule.factor(20 * i - 1, 20 * count, []) for i in range(1, count + 1)],
    }
    return Record.from_json({"config": config.described(), "status": "done", "curves": curves})


def drawn(axes: Axes) -> dict[str, list[tuple[float, float]]]:
    """The points of each curve, by its label."""
    lines = [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]
    return {str(line.get_label()): list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in lines}


def refreshed(accuracies, **changes):
    found = record([10.0] * len(accuracies), **changes)
    found.curves.refreshed_accuracy = accuracies
    return found


def test_refreshed_evaluations_are_drawn_if_all_runs_have_them():
    runs = [refreshed([50.0, 90.0]), refreshed([60.0, 80.0], operator="conv")]
    axes = run_curves(runs).axes[0]
    assert [list(line.get_ydata()) for line in axes.get_lines()[:2]] == [[50.0, 10.0], [40.0, 20.0]]
    assert axes.get_ylabel() == "test error, %\n(refreshed statistics)"
    for other in (record([70.0, 75.0], operator="ball-cos"), refreshed([None, 90.0], operator="ball-cos")):
        axes = run_curves([*runs, other]).axes[0]
        assert list(axes.get_lines()[0].get_ydata()) == [90.0, 90.0]
        assert axes.get_ylabel() == "test error, %"


def test_figure_4_shows_runs_with_refreshed_evaluations_if_there_are_two():
    plain, other = record([50.0]), record([50.0], operator="conv")
    new = [refreshed([50.0], operator="ball-cos"), refreshed([50.0], operator="log-cos")]
    assert figure4_records([plain, other, new[0]]) == [plain, other, new[0]]
    assert figure4_records([plain, other, *new]) == new


def test_seeds_are_drawn_as_mean_and_band():
    records = [record([50.0, 90.0], [1.0, 0.5], seed=0), record([70.0, 94.0], [2.0, 0.7], seed=1)]
    test, loss, _ = run_curves(records).axes
    assert drawn(test) == {"tanh-cos, mean of 2": [(1, 40), (2, 8)]}
    assert drawn(loss) == {"tanh-cos, mean of 2": [(1, 1.5), (2, 0.6)]}
    band = test.collections[0].get_paths()[0].get_extents()
    assert (band.ymin, band.ymax) == (6, 50)


def test_accuracy_instead_of_error():
    test, _, _ = run_curves([record([50.0, 90.0])], "accuracy").axes
    assert drawn(test) == {"tanh-cos": [(1, 50), (2, 90)]}
    assert test.get_ylabel() == "test accuracy, %"
    assert not test.collections


def test_mean_uses_the_runs_that_reached_a_point_and_only_finite_values():
    records = [record([50.0, 90.0, 92.0], seed=0), record([70.0], [None], seed=1)]
    test, loss, _ = run_curves(records, "accuracy").axes
    assert drawn(test) == {"tanh-cos, mean of 1 to 2": [(1, 60), (2, 90), (3, 92)]}
    assert drawn(loss)["tanh-cos, mean of 1 to 2"][0] == (1, 1.0)
    gap, _, _ = run_curves([record([50.0, None, 92.0])], "accuracy").axes
    assert drawn(gap) == {"tanh-cos": [(1, 50), (3, 92)]}


def names(*records: Record) -> list[str]:
    return labels(list(group_by_seed(records).values()))


def test_labels_show_the_differing_settings():
    flat = [50.0, 60.0]
    assert names(record(flat, operator="conv"), record(flat)) == ["conv", "tanh-cos"]
    assert names(record(flat, lr=0.01), record(flat, lr=0.02)) == ["lr=0.01", "lr=0.02"]
    assert names(record(flat, width=0.5, operator="conv"), record(flat)) == ["conv, width=0.5", "tanh-cos, width=1"]
    assert names(record(flat, schedule=Steps()), record(flat)) == ["schedule=step", "schedule=cosine"]
    assert names(record(flat, pretrained="runs/a"), record(flat)) == ["pretrained=a", "pretrained=None"]
    crops, squares = Augmentation(pad=4), Augmentation(pad=4, cutout=8)
    of_parts = names(record(flat, augmentation=crops), record(flat, augmentation=squares))
    assert of_parts == ["augmentation=cutout=0", "augmentation=cutout=8"]
    part = record(flat, train_images=60, operator="conv")
    assert names(part, record(flat)) == ["conv, train_images=60", "tanh-cos"]


def test_label_keeps_the_fraction_of_an_adversary():
    attacked = [record([60.0], adversary=f"{kind}(epsilon=6/255)") for kind in ("fgsm", "pgd")]
    assert names(*attacked) == ["adversary=fgsm(epsilon=6/255)", "adversary=pgd(epsilon=6/255)"]


def test_settings_of_the_same_name_are_labeled_by_all_values():
    drops = [record([60.0], schedule=Steps((2, 3), drop)) for drop in (0.1, 0.5)]
    assert names(*drops) == [f"schedule=step(milestones=[2, 3],drop={drop})" for drop in (0.1, 0.5)]
    started = [record([60.0], pretrained=f"runs/{run}/weights.safetensors") for run in "ab"]
    assert names(*started) == [f"pretrained=runs/{run}/weights.safetensors" for run in "ab"]


def test_labels_omit_settings_with_equal_text():
    lengths = [record([60.0], steps=steps, epochs=None, schedule=Steps((steps // 2,))) for steps in (20, 40)]
    assert names(*lengths) == ["steps=20", "steps=40"]


def older(found: Record) -> Record:
    """The same record of a version without adversaries and snapshots."""
    config = {key: value for key, value in found.config.items() if key not in ("adversary", "feature_snapshots")}
    return dataclasses.replace(found, config=config)


def test_missing_settings_of_old_records_have_their_defaults():
    old, new = older(record([50.0], seed=0)), record([70.0], seed=1)
    assert names(old, new) == names(new, old) == ["tanh-cos, mean of 2"]
    attacked = record([60.0], adversary="fgsm")
    assert names(old, attacked) == ["adversary=None", "adversary=fgsm"]
    newer = record([60.0])
    newer.config["of_later"] = 1
    assert names(new, newer) == ["of_later=None", "of_later=1"]


def test_labels_ignore_settings_without_effect_on_a_plain_network():
    pair = [record([50.0], recipe="paper-cifar", operator=operator) for operator in ("conv", "tanh-cos", "seg-cos")]
    assert pair[0].config["orthonormal"] != pair[1].config["orthonormal"]
    assert names(*pair) == ["conv", "tanh-cos", "seg-cos"]


def test_title_has_the_common_settings():
    both = [[record([50.0], operator="conv")], [record([50.0])]]
    assert common_words(both) == "digits, cnn9-small"
    assert common_words(both[1:]) == "digits, cnn9-small, tanh-cos"
    assert run_curves([record([50.0], seed=seed) for seed in (0, 1)]).get_suptitle().endswith("over seeds")


def test_drops_of_the_learning_rate_are_marked_in_all_panels():
    figure = run_curves([record([50.0] * 8, schedule=Steps((0.5, 0.75)))])
    for axes in figure.axes:
        dotted = [line for line in axes.get_lines() if line.get_linestyle() == ":"]
        assert [line.get_xdata()[0] for line in dotted] == [4, 6]
    assert figure.axes[2].get_yscale() == "log"


def test_cosine_schedule_has_a_linear_scale_and_no_drop_lines():
    figure = run_curves([record([50.0] * 30)])
    assert not [line for axes in figure.axes for line in axes.get_lines() if line.get_linestyle() == ":"]
    assert figure.axes[2].get_yscale() == "linear"


def test_equal_learning_rates_are_drawn_once():
    same = run_curves([record([50.0, 60.0]), record([50.0, 60.0], operator="conv")]).axes[2]
    assert len(same.get_lines()) == 1
    other = run_curves([record([50.0, 60.0]), record([50.0, 60.0], lr=0.1)]).axes
    assert [line.get_color() for line in other[2].get_lines()] == [line.get_color() for line in other[0].get_lines()]


@pytest.mark.parametrize(("losses", "scale"), [([2.0, 0.01], "log"), ([2.0, 0.5], "linear"), ([2.0, 0.0], "linear")])
def test_loss_has_a_log_scale_if_it_varies_by_a_factor_of_ten(losses: list[float | None], scale: str):
    assert run_curves([record([50.0, 60.0], losses)]).axes[1].get_yscale() == scale


def test_axis_ignores_the_rise_from_chance_level():
    error, _, _ = run_curves([record([10.0, 90.0, 94.0, 95.0])]).axes
    assert error.get_ylim()[1] < 12
    accuracy, _, _ = run_curves([record([10.0, 90.0, 94.0, 95.0])], "accuracy").axes
    assert accuracy.get_ylim()[0] > 88


def test_eight_curves_have_distinct_colors_and_one_legend():
    specs = ["conv", "tanh-cos", "ball-cos", "seg-cos", "log-cos", "mix-cos", "linear-cos", "sphere-cos"]
    figure = run_curves([record([50.0 + i, 60.0], operator=spec) for i, spec in enumerate(specs)])
    assert len({line.get_color() for line in figure.axes[0].get_lines()}) == 8
    assert [text.get_text() for text in figure.legends[0].get_texts()] == specs


def test_one_evaluation_is_a_visible_point():
    (line,) = run_curves([record([50.0])]).axes[0].get_lines()
    assert line.get_marker() == "o"
    assert math.isfinite(line.get_ydata()[0])
