"""What is behind Table 3 where it surprises: networks of it with one thing changed.

With batch normalisation `linear-cos` computes what the plain network does, whose filters have a length that is taken
out again. What makes it better is how it is trained, then: filters that do not decay, are projected, or are kept apart.
The plain network without ReLU, and `mix`, whose alpha and beta the paper does not give, are far from the paper's.
"""

from typing import Any

from dcnet.experiments.experiment import Cell, Experiment, register
from dcnet.operator import PLAIN
from dcnet.training import recipe

RELU, BARE = "ReLU", "no ReLU"
COLUMNS: dict[str, dict[str, Any]] = {RELU: {}, BARE: {"activation": "none"}}
# By what it is called: the operator, what differs from the recipe, and the columns that it is for.
ROWS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "plain": (PLAIN, {}, (RELU, BARE)),
    "plain, no decay": (PLAIN, {"weight_decay": 0.0}, (RELU,)),
    "plain, no normalisation": (PLAIN, {"norm": "none"}, (RELU, BARE)),
    "linear-cos": ("linear-cos", {}, (RELU, BARE)),
    "linear-cos, no projection": ("linear-cos", {"projection_every": 0}, (RELU,)),
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
    """CNN-9 by the paper's recipe, less one part of it."""
    cells = tuple(
        Cell(row, column, recipe("paper-cifar", model="cnn9", operator=operator, **changes, **COLUMNS[column]))
        for row, (operator, changes, columns) in ROWS.items()
        for column in columns
    )
    title = "What makes the difference: CNN-9, CIFAR-100, test error in %"
    return Experiment("causes", title, cells, tuple(COLUMNS), notes=(NOTE,))
