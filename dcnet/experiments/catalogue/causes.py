"""Ablations of Tables 3 and 4: their networks with one thing changed.

With batch normalisation `linear-cos` computes the same functions as the plain network, whose filter norms the
normalisation removes. If it is better, the cause is its training: filters that do not decay, are projected, or are kept
orthonormal. Two cells of Table 3 are far from the paper's: the plain network without ReLU, and `mix`, whose alpha and
beta the paper does not give.
"""

from typing import Any

from dcnet.experiments.experiment import Cell, Experiment, register
from dcnet.operator import PLAIN
from dcnet.training import recipe

RELU, BARE, RESNET = "CNN-9", "CNN-9, no ReLU", "ResNet-32"
COLUMNS: dict[str, dict[str, Any]] = {
    RELU: {"model": "cnn9"},
    BARE: {"model": "cnn9", "activation": "none"},
    RESNET: {"model": "resnet32"},
}
# By what it is called: the operator, what differs from the recipe, and the columns that it is for.
ROWS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "plain": (PLAIN, {}, (RELU, BARE, RESNET)),
    "plain, no decay": (PLAIN, {"weight_decay": 0.0}, (RELU,)),
    "plain, no normalisation": (PLAIN, {"norm": "none"}, (RELU, BARE)),
    "linear-cos": ("linear-cos", {}, (RELU, BARE, RESNET)),
    "linear-cos, no projection": ("linear-cos", {"projection_every": 0}, (RELU, RESNET)),
    "linear-cos, no constraint": ("linear-cos", {"orthonormal": 0.0}, (RELU,)),
    "linear-cos, neither": ("linear-cos", {"projection_every": 0, "orthonormal": 0.0}, (RELU,)),
    "mix-cos": ("mix-cos", {}, (RELU, BARE)),
    "mix-cos, alpha 0.1": ("mix(scale=0.1)-cos", {}, (BARE,)),
}
NOTE = (
    "With batch normalisation linear-cos computes what the plain network does; what they differ in is how they are "
    "trained: weight decay, projection, and the orthonormal constraint."
)


@register
def causes() -> Experiment:
    """CNN-9 and ResNet-32 by the paper's recipe, less one part of it."""
    cells = tuple(
        Cell(row, column, recipe("paper-cifar", operator=operator, **changes, **COLUMNS[column]))
        for row, (operator, changes, columns) in ROWS.items()
        for column in columns
    )
    title = "What makes the difference: CIFAR-100, test error in %"
    return Experiment("causes", title, cells, tuple(COLUMNS), notes=(NOTE,))
