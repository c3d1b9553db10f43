"""Table 1: weightings, and what is done about gradients that fall with the norm of a filter."""

from typing import Any

from dcnet.experiments.experiment import Cell, Experiment, register
from dcnet.training import recipe

# By what it is called: the paper's error, the operator, and what differs from the recipe.
PLAIN_GRADIENTS: dict[str, Any] = {"projection_every": 0}
ROWS: dict[str, tuple[float, str, dict[str, Any]]] = {
    "linearly weighted": (22.95, "tanh-cos+linear", PLAIN_GRADIENTS),
    "weighted, Eq. 15": (23.03, "tanh-cos+joint", PLAIN_GRADIENTS),
    "weighted, Eq. 16": (23.38, "tanh-cos+product", PLAIN_GRADIENTS),
    "standard gradients": (23.09, "tanh-cos", PLAIN_GRADIENTS),
    "weight projection": (21.17, "tanh-cos", {}),
    "weighted gradients": (21.45, "tanh-cos", PLAIN_GRADIENTS | {"weighted_gradients": "gradient"}),
}


@register
def table1() -> Experiment:
    """TanhConv in ResNet-32, with filters that count by their norm and without."""
    cells = tuple(
        Cell(row, "tanh-cos", recipe("paper-cifar", operator=operator, **changes), paper)
        for row, (paper, operator, changes) in ROWS.items()
    )
    return Experiment("table1", "Table 1: TanhConv in ResNet-32, CIFAR-100, test error in %", cells)
