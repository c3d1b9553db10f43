"""Validation, serialization and hashing of configs; schedules."""

import dataclasses
import itertools
import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from dcnet.cli.app import parse
from dcnet.data import Augmentation
from dcnet.training import RECIPES, RunConfig, config_of, recipe
from dcnet.training.adversarial import PGD
from dcnet.training.recipes import command_of
from dcnet.training.schedules import SCHEDULES, Cosine, ImageSizes, Linear, Plateau, Steps

RESULTS = Path(__file__).parents[2] / "results"


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_round_trip_through_json(name):
    config = recipe(name)
    again = config_of(json.loads(json.dumps(config.described())))
    assert again == config
    assert again.hash == config.hash


def test_every_value_changes_the_hash():
    base = recipe("digits")
    others = {
        "operator": "seg-cos", "seed": 1, "lr": 1e-4, "batch_size": 31, "width": 0.5, "label_smoothing": 0.1,
        "schedule": Steps(), "augmentation": Augmentation(flip=True), "orthonormal": 1e-5, "optimizer": "sgd",
    }  # fmt: skip
    hashes = {base.hash, *(dataclasses.replace(base, **{name: value}).hash for name, value in others.items())}
    assert len(hashes) == len(others) + 1


def test_the_other_rate_of_a_recipe_is_ignored_by_other_optimizers():
    assert recipe("speedrun").other_rate == 0.2
    assert recipe("speedrun", optimizer="sgd").other_rate is None


def test_momentum_requires_an_optimizer_with_momentum():
    assert recipe("digits", momentum=0.5, optimizer="sgd").momentum == 0.5
    assert recipe("paper-imagenet", momentum=0.5).momentum == 0.5
    # The norm_momentum of a recipe is ignored for networks without normalization.
    assert recipe("paper-cifar", norm="none").norm_momentum == 1e-3
    for norm in ("none", "layer", "rms"):
        with pytest.raises(ValueError, match=rf"norm '{norm}' has no norm_momentum \(got 0.1\)"):
            recipe("vit-cifar", norm=norm, norm_momentum=0.1)
    with pytest.raises(ValueError, match=r"optimizer 'adamw' has no momentum \(got 0.9\): omit it"):
        recipe("paper-imagenet", momentum=0.9, optimizer="adamw")


def test_equal_operators_give_equal_hashes():
    assert recipe("digits", operator="tanh(scale=1.0)-cos").hash == recipe("digits", operator="tanh-cos").hash


def test_plain_networks_ignore_options_of_decoupled_layers():
    plain = recipe("paper-cifar", operator="conv", projection_every=100, weighted_gradients="update")
    assert (plain.projection_every, plain.weighted_gradients, plain.orthonormal) == (0, "none", 0.0)
    assert plain == recipe("paper-cifar", operator="conv", projection_every=7)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": "adamax"}, "adamax"),
        ({"optimizer": "sphere-sgd", "operator": "conv"}, "needs an unweighted operator, not 'conv': use sgd or muon"),
        ({"optimizer": "sphere-sgd", "operator": "tanh-cos+linear"}, "needs an unweighted operator, not 'tanh-cos"),
        ({"precision": "float16"}, "float16"),
        ({"lr": 0.0}, "lr must be positive, not 0.0"),
        ({"lr": float("nan")}, "lr must be finite"),
        ({"batch_size": 1}, "batch_size must be a whole number, 2 or more, not 1"),
        ({"seed": -1}, "seed must be a whole number, 0 or more, not -1"),
        ({"steps": 3, "epochs": 4}, "steps=3 and epochs=4"),
        ({"label_smoothing": 1.0}, "label_smoothing must be in [0, 1), not 1.0"),
        ({"pixel_std": (0.0,)}, "pixel_std must be above 0"),
        ({"operator": "tanh-cosine"}, "cosine"),
        ({"operator": "tanh-cos+linear", "projection_every": 100}, "projection_every=100 needs an unweighted operator"),
        ({"operator": "tanh-cos+joint", "weighted_gradients": "update"}, "weighted_gradients='update' needs"),
        ({"weight_decay": -1.0}, "weight_decay must not be negative, not -1.0"),
        ({"margin": "a-sofmax"}, "did you mean 'a-softmax'"),
        ({"margin": "a-softmax", "classifier": "linear"}, "classifier='linear' and margin="),
        ({"margin": "a-softmax", "annealing": "slow"}, "slow"),
        ({"features": 2}, "features=2 needs a head with a margin"),
        ({"margin": "arcface", "features": 0}, "features must be a whole number, 1 or more, not 0"),
        (
            {"margin": "sphereface2(m=0.2)", "label_smoothing": 0.1},
            "margin 'sphereface2(m=0.2)' does not support label_smoothing (got 0.1)",
        ),
        ({"interclass_filtering_threshold": 0.4}, "interclass_filtering_threshold=0.4 needs a head with a margin"),
        (
            {"margin": "arcface", "interclass_filtering_threshold": 0.0},
            "interclass_filtering_threshold must be in (0, 1], not 0.0",
        ),
        (
            {"margin": "arcface", "interclass_filtering_threshold": 0.4, "label_smoothing": 0.1},
            "interclass_filtering_threshold=0.4 does not support label_smoothing (got 0.1): omit one of them",
        ),
        ({"sample_classes": 0.5}, "sample_classes=0.5 needs a head with a margin"),
        ({"margin": "arcface", "sample_classes": 0.0}, "sample_classes must be in (0, 1], not 0.0"),
        (
            {"margin": "arcface", "sample_classes": 0.5, "label_smoothing": 0.1},
            "sample_classes=0.5 does not support label_smoothing (got 0.1): omit one of them",
        ),
        ({"progressive_sizes": "16"}, "progressive sizes must be like 16:0.4,24:0.7, not '16'"),
        ({"progressive_sizes": "a:0.5"}, "progressive sizes must be like 16:0.4,24:0.7, not 'a:0.5'"),
        ({"progressive_sizes": "0:0.5"}, "a progressive size must be a whole number, 1 or more, not 0"),
        ({"progressive_sizes": "16:0.5,24:0.5"}, "must end at increasing fractions of the steps, not at 0.5"),
        ({"progressive_sizes": "16:1"}, "must end at increasing fractions of the steps, not at 1"),
        ({"optimizer": "muon", "other_rate": 0.0}, "other_rate must be positive, not 0.0"),
        ({"other_rate": 0.5}, "optimizer 'adam' has no other_rate (got 0.5): omit it, or use muon"),
        ({"seed": 2**63}, "seed must be below 2^63, not 9223372036854775808"),
    ],
)
def test_invalid_values_raise_an_error(changes, words):
    with pytest.raises((ValueError, TypeError)) as error:
        recipe("digits", **changes)
    assert words in str(error.value)


def test_unknown_recipes_fields_and_schedules_raise_an_error():
    with pytest.raises(ValueError, match="paper-cifar"):
        recipe("paper-cfiar")
    with pytest.raises(ValueError, match="warp"):
        config_of({**recipe("digits").described(), "warp": 1})
    with pytest.raises(ValueError, match="unknown schedule"):
        config_of({**recipe("digits").described(), "schedule": {"name": "stairs"}})


def test_milestones_scale_with_the_length_of_the_run():
    assert recipe("paper-cifar", steps=425).schedule == Steps((200, 300, 375))
    assert recipe("paper-cifar").schedule == Steps((20_000, 30_000, 37_500))
    shares = recipe("paper-cifar", epochs=10).schedule.milestones
    assert shares == pytest.approx((20_000 / 42_500, 30_000 / 42_500, 37_500 / 42_500))
    assert recipe("paper-cifar", steps=425, schedule=Cosine()).schedule == Cosine()
    assert recipe("paper-cifar", steps=1).schedule == Steps((1, 1, 1))


def test_integers_of_numpy_are_stored_as_those_of_python():
    given = {"seed": 3, "epochs": 2, "batch_size": 16, "evaluate_every": 5}
    expected = recipe("digits", augmentation=Augmentation(pad=2, cutout=4), adversary="pgd(steps=3)", **given)
    found = recipe(
        "digits",
        augmentation=Augmentation(pad=np.int64(2), cutout=np.int64(4)),
        adversary=PGD(steps=np.int64(3)),
        **{name: np.int64(value) for name, value in given.items()},
    )
    assert found == expected
    assert found.hash == expected.hash
    assert config_of(json.loads(json.dumps(found.described()))) == expected


@pytest.mark.parametrize("kind", [np.float32, np.float64, Fraction])
def test_numbers_of_numpy_are_stored_as_those_of_python(kind):
    given = {"lr": 0.5, "weight_decay": 0.25, "sample_classes": 0.125, "margin_scale": 32.5, "width": 2.0}
    expected = recipe("digits", margin="arcface", **given)
    found = recipe("digits", margin="arcface", **{name: kind(value) for name, value in given.items()})
    assert found == expected
    assert found.hash == expected.hash
    assert {type(getattr(found, name)) for name in given} == {float}
    assert config_of(json.loads(json.dumps(found.described()))) == expected


def test_whole_numbers_stay_whole_numbers_so_that_hashes_stay():
    assert type(recipe("digits", lr=1).described()["lr"]) is int
    assert type(recipe("digits", lr=np.int64(1)).described()["lr"]) is int


def test_long_names_are_truncated_to_a_valid_folder_name():
    long = "&".join(f"linear(scale=1.{i})" for i in range(60)) + "-cos"
    configs = [recipe("digits", operator=long, seed=seed) for seed in (0, 2**62)]
    assert [len(config.name) for config in configs] == [200, 200]
    assert configs[0].name.endswith("-seed0")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"operator": "conv"},
        {"seed": 3, "model": "cnn9", "activation": "none"},
        {"steps": 100},
        {"epochs": 3},
        {"steps": 100, "schedule": Plateau()},
        {"schedule": Cosine()},
    ],
)
def test_command_of_parses_back_to_the_config(changes):
    config = recipe("paper-cifar", **changes)
    words = command_of(config).split()
    assert words[:2] == ["dcnet", "train"]
    command = parse(words[1:])
    assert command._configs() == [config]


# --- schedules ---


def test_steps_drop_at_milestones():
    schedule = Steps((10, 0.5), drop=0.1)
    factors = [schedule.factor(step, 40, []) for step in (0, 9, 10, 19, 20, 39)]
    assert factors == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


def test_cosine_has_a_warmup_and_a_floor():
    schedule = Cosine(warmup=4, floor=0.1)
    factors = [schedule.factor(step, 104, []) for step in range(105)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[54] == pytest.approx(0.55)
    assert factors[104] == pytest.approx(0.1)
    assert all(later < earlier for earlier, later in itertools.pairwise(factors[4:]))


def test_linear_rises_and_falls_along_lines():
    factors = [Linear(warmup=0.25, floor=0.2).factor(step, 12, []) for step in range(13)]
    rise, fall = [0.25, 0.5, 0.75], [1 - 0.8 * count / 9 for count in range(10)]
    assert factors == pytest.approx(rise + fall)


def test_image_sizes_by_step():
    sizes = ImageSizes.parse("16:0.25, 24:0.5")
    assert str(sizes) == "16:0.25,24:0.5"
    assert [sizes.at(step, 8) for step in range(8)] == [16, 16, 24, 24, None, None, None, None]
    assert sizes.changes(8) == [2, 4]
    none = ImageSizes.parse(None)
    assert (none.at(0, 8), none.changes(8)) == (None, [])


def test_a_warmup_below_one_is_a_fraction_of_all_steps():
    for total in (2, 40, 1000):
        share, count = Cosine(warmup=0.1), Cosine(warmup=round(0.1 * total))
        assert [share.factor(i, total, []) for i in range(total)] == [count.factor(i, total, []) for i in range(total)]


def test_plateau_depends_on_the_losses_only():
    schedule = Plateau(drop=0.5, patience=2)
    losses = [1.0, 0.5, 0.6, 0.51, 0.4, 0.4, 0.41, 0.42, 0.43]
    factors = [schedule.factor(0, 1, losses[:count]) for count in range(len(losses) + 1)]
    assert factors == [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.125]
    # A loss that hardly decreases is on a plateau, too.
    creeping = [1.0 - 1e-4 * count for count in range(5)]
    assert [Plateau(0.5, 2, better).factor(0, 1, creeping) for better in (1e-3, 1e-5)] == [0.25, 1]


@pytest.mark.parametrize("schedule", SCHEDULES.values())
def test_schedule_factors_are_between_zero_and_one(schedule):
    made = schedule()
    assert all(0 <= made.factor(step, 50, [1.0] * 30) <= 1 for step in range(51))


@pytest.mark.parametrize(
    "make",
    [lambda: Steps(drop=0.0), lambda: Steps((0,)), lambda: Cosine(floor=2.0), lambda: Plateau(patience=0)],
)
def test_invalid_schedules_raise_an_error(make):
    with pytest.raises(ValueError):  # noqa: PT011 - each says something else
        make()


def test_configs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunConfig(steps=1).lr = 2.0


def test_records_have_the_names_and_hashes_of_their_configs():
    for file in sorted(RESULTS.glob("*/*.json")):
        record = json.loads(file.read_text())
        config = config_of(record["config"])
        assert file.stem == f"{config.name}-{config.hash}"
        found = tuple(record[name] for name in ("name", "hash", "command"))
        assert found == (config.name, config.hash, command_of(config)), file


def test_a_sample_of_the_classes_changes_the_hash_unless_it_has_all_of_them():
    whole, some = recipe("digits", margin="arcface"), recipe("digits", margin="arcface", sample_classes=0.5)
    assert some.hash != whole.hash
    assert recipe("digits", margin="arcface", sample_classes=1.0) == whole
    # The label smoothing of a recipe needs all classes.
    assert recipe("speedrun", margin="arcface").label_smoothing == 0.1
    assert recipe("speedrun", margin="arcface", sample_classes=0.5).label_smoothing == 0
    assert command_of(some) == "dcnet train --recipe digits --margin arcface --sample-classes 0.5"


def test_margin_specs_are_normalized():
    one, other = recipe("paper-cifar", margin="arcface(m=0.5)"), recipe("paper-cifar", margin="arcface")
    assert one == other
    assert one.log_floor == 0
    assert "arcface" in one.name
    assert recipe("digits", margin="arcface(m=0.3)").hash != recipe("digits", margin="arcface").hash


def test_default_values_are_not_hashed():
    """A field that a later version adds does not change the hash of old runs."""
    assert recipe("paper-cifar").hash == "efce513e"
    assert recipe("digits", operator="conv", seed=1).hash == "a8a7cbb4"
