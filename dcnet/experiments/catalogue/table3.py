"""Table 3: every magnitude, with and without ReLU."""

from typing import Any

from dcnet.experiments.experiment import Cell, Experiment, register
from dcnet.operator import PLAIN
from dcnet.training import recipe

BARE, BARE_SQUARE, RELU, RELU_SQUARE = "cos, no ReLU", "sqcos, no ReLU", "cos, ReLU", "sqcos, ReLU"
# ReLU is the network's own, and a run that says so has another name than one that does not.
COLUMNS: dict[str, tuple[str, dict[str, Any]]] = {
    BARE: ("cos", {"activation": "none"}),
    BARE_SQUARE: ("sqcos", {"activation": "none"}),
    RELU: ("cos", {}),
    RELU_SQUARE: ("sqcos", {}),
}


def _row(*values: float | None) -> dict[str, float | None]:
    """The paper's numbers in the order of the columns; None for a cell that it does not have."""
    return dict(zip(COLUMNS, values, strict=True))


PAPER: dict[str, dict[str, float | None]] = {
    "baseline": {BARE: 58.24, RELU: 26.01},
    "sphere": _row(33.31, 25.90, 26.00, 26.97),
    "ball": _row(31.81, 25.43, 25.18, 26.48),
    "tanh": _row(32.27, 25.27, 25.15, 26.94),
    "linear": _row(36.49, 24.36, 24.81, 25.14),
    "seg": _row(33.57, 24.29, 24.96, 25.04),
    "log": _row(33.62, 24.91, 25.17, 25.85),
    "mix": _row(33.46, 24.93, 25.27, 25.77),
}


@register
def table3() -> Experiment:
    """CNN-9 with batch normalisation."""
    cells = []
    for row, values in PAPER.items():
        for column, paper in values.items():
            angle, changes = COLUMNS[column]
            operator = PLAIN if row == "baseline" else f"{row}-{angle}"
            cells.append(Cell(row, column, recipe("paper-cifar", model="cnn9", operator=operator, **changes), paper))
    return Experiment("table3", "Table 3: CNN-9, CIFAR-100, test error in %", tuple(cells), order=tuple(COLUMNS))
