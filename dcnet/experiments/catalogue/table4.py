"""Table 4: every magnitude and angle in a residual network."""

from dcnet.experiments.experiment import Cell, Experiment, register
from dcnet.operator import PLAIN
from dcnet.training import recipe

ANGLES = ("linear", "cos", "sqcos")
# By angle; None for a cell that the paper does not have.
PAPER: dict[str, dict[str, float | None]] = {
    "baseline": {"cos": 26.69},
    "sphere": {"linear": 21.79, "cos": 21.44, "sqcos": 24.40},
    "ball": {"linear": 21.44, "cos": 21.12, "sqcos": 24.31},
    "tanh": {"linear": 21.60, "cos": 21.17, "sqcos": 24.77},
    "linear": {"linear": 21.09, "cos": 22.17, "sqcos": 21.31},
    "seg": {"linear": 20.86, "cos": 20.91, "sqcos": 20.88},
    "log": {"linear": 21.84, "cos": 21.08, "sqcos": 22.86},
    "mix": {"linear": 21.02, "cos": 21.28, "sqcos": 21.81},
}


@register
def table4() -> Experiment:
    """ResNet-32 on CIFAR-100."""
    cells = []
    for row, columns in PAPER.items():
        for angle, paper in columns.items():
            operator = PLAIN if row == "baseline" else f"{row}-{angle}"
            cells.append(Cell(row, angle, recipe("paper-cifar", operator=operator), paper))
    return Experiment("table4", "Table 4: ResNet-32, CIFAR-100, test error in %", tuple(cells), order=ANGLES)
