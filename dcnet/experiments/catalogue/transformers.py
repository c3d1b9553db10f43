"""Vision transformers with plain and decoupled linear layers: on CIFAR-100, and the scale of bounded operators."""

from collections.abc import Mapping
from typing import Any

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
    base = {"name": "digits", "model": "vit-tiny", "width": WIDTH, "epochs": DIGIT_EPOCHS}
    base |= {"optimizer": "adamw", "weight_decay": 0.05}
    title = f"Scale of bounded operators: vit-tiny of width {WIDTH}, digits, {DIGIT_EPOCHS} epochs, test error in %"
    return _experiment("transformer_scales", title, base, DIGIT_NETWORKS)
