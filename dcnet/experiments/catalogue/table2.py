"""Table 2: without batch normalisation."""

from dcnet.experiments.experiment import NOT_CONVERGED, Cell, Experiment, register
from dcnet.operator import PLAIN
from dcnet.training import recipe

ANGLES = ("linear", "cos", "sqcos")
# By angle; None for a cell that the paper does not have.
PAPER: dict[str, dict[str, float | str | None]] = {
    "baseline": {"cos": 35.30},
    "linear": {"linear": 33.39, "cos": 31.76, "sqcos": NOT_CONVERGED},
    "tanh": {"linear": 32.88, "cos": 31.88, "sqcos": 34.26},
    "seg": {"linear": 34.69, "cos": 30.34, "sqcos": NOT_CONVERGED},
}


@register
def table2() -> Experiment:
    """CNN-9 with ReLU and without batch normalisation."""
    cells = []
    for row, columns in PAPER.items():
        for column, paper in columns.items():
            operator = PLAIN if row == "baseline" else f"{row}-{column}"
            config = recipe("paper-cifar", model="cnn9", norm="none", operator=operator)
            cells.append(Cell(row, column, config, paper))
    title = "Table 2: CNN-9 without batch normalisation, CIFAR-100, test error in %"
    return Experiment("table2", title, tuple(cells), order=ANGLES)
