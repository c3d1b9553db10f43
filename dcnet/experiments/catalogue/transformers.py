"""Vision transformers with plain and decoupled linear layers, and a scale for bounded operators."""

from collections.abc import Mapping
from typing import Any

from dcnet.data.mnist import DIGITS_VALIDATION
from dcnet.experiments.contest import Candidate, Contest, Side, contest_experiment
from dcnet.experiments.experiment import Cell, Experiment, register
from dcnet.operator import PLAIN
from dcnet.training import recipe

EPOCHS = 50
# The cosine of a random filter and a token of d features is about 1 / sqrt(d). With 192 features, this scale makes the
# output of a bounded operator as large as that of a plain layer.
SCALE = 14
# By row: what differs from the recipe.
NETWORKS: dict[str, dict[str, Any]] = {
    "plain": {"operator": PLAIN},
    "linear-cos": {"operator": "linear-cos"},
    "tanh-cos": {"operator": "tanh-cos"},
    f"tanh-cos, scale {SCALE}": {"operator": f"tanh(scale={SCALE})-cos"},
    f"sphere-cos, scale {SCALE}": {"operator": f"sphere(scale={SCALE})-cos"},
    "linear-cos, normalized tokens": {"model": "vit-tiny-normalized", "operator": "linear-cos"},
}
# The same with 48 features, on the digits.
DIGIT_EPOCHS, WIDTH, DIGIT_SCALE = 20, 0.25, 7
SMALL: dict[str, Any] = {"name": "digits", "model": "vit-tiny", "width": WIDTH, "optimizer": "adamw"}
DIGIT_NETWORKS: dict[str, dict[str, Any]] = {
    "plain": {"operator": PLAIN},
    "linear-cos": {"operator": "linear-cos"},
    "tanh-cos": {"operator": "tanh-cos"},
    f"tanh-cos, scale {DIGIT_SCALE}": {"operator": f"tanh(scale={DIGIT_SCALE})-cos"},
    "sphere-cos": {"operator": "sphere-cos"},
    f"sphere-cos, scale {DIGIT_SCALE}": {"operator": f"sphere(scale={DIGIT_SCALE})-cos"},
}


def _experiment(
    name: str, title: str, base: Mapping[str, Any], networks: Mapping[str, Mapping[str, Any]]
) -> Experiment:
    cells = tuple(Cell(row, "test error", recipe(**{**base, **own})) for row, own in networks.items())
    return Experiment(name, title, cells, seeds=3)


@register
def transformers() -> Experiment:
    """ViT-Ti for images of 32 x 32, with a quarter of the epochs of its recipe."""
    base = {"name": "vit-cifar", "epochs": EPOCHS}
    title = f"Transformers: vit-tiny, CIFAR-100, {EPOCHS} epochs by one recipe, test error in %"
    return _experiment("transformers", title, base, NETWORKS)


@register
def transformer_scales() -> Experiment:
    """A small ViT on the digits: bounded operators with and without a scale."""
    base = {**SMALL, "epochs": DIGIT_EPOCHS, "weight_decay": 0.05}
    title = f"Scale of bounded operators: vit-tiny of width {WIDTH}, digits, {DIGIT_EPOCHS} epochs, test error in %"
    return _experiment("transformer_scales", title, base, DIGIT_NETWORKS)


# The contest of the same networks: the rates and decays of every side, and the steps of a run.
RATES, DECAYS, STEPS = (3e-4, 1e-3, 3e-3, 1e-2), (0.0, 0.1, 1.0, 3.0, 10.0), 800
CONTESTANTS = ("plain", "linear-cos", f"tanh-cos, scale {DIGIT_SCALE}", f"sphere-cos, scale {DIGIT_SCALE}")


@register
def contest_transformer() -> Experiment:
    """A small ViT on the digits: plain and decoupled, each with the best of twenty recipes."""
    sides = tuple(_side(name, DIGIT_NETWORKS[name]["operator"]) for name in CONTESTANTS)
    notes = (
        f"Held-out error: {STEPS} steps, measured on 150 of the 600 training images; one seed, or two for the best "
        f"four recipes of a side. Test error: the best recipe, {STEPS} steps, all training images, other seeds.",
    )
    title = f"Contest, transformers: vit-tiny of width {WIDTH}, digits, error in %"
    return contest_experiment("contest_transformer", title, Contest(sides, {"dataset": DIGITS_VALIDATION}), 5, notes)


def _side(name: str, operator: str) -> Side:
    base = {**SMALL, "operator": operator, "epochs": None, "steps": STEPS}
    candidates = [
        Candidate("AdamW", recipe(**{**base, "lr": rate, "weight_decay": decay})) for decay in DECAYS for rate in RATES
    ]
    return Side(name, tuple(candidates), reference=operator == PLAIN)
