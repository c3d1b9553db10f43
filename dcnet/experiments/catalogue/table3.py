"""Table 3: every magnitude, with and without ReLU."""

from dcnet.experiments.experiment import Cell, Experiment, register
from dcnet.operator import PLAIN
from dcnet.training import recipe

# Of each magnitude: cos and sqcos without ReLU, cos and sqcos with it.
PAPER: dict[str, tuple[float | None, ...]] = {
    "baseline": (58.24, None, 26.01, None),
    "sphere": (33.31, 25.90, 26.00, 26.97),
    "ball": (31.81, 25.43, 25.18, 26.48),
    "tanh": (32.27, 25.27, 25.15, 26.94),
    "linear": (36.49, 24.36, 24.81, 25.14),
    "seg": (33.57, 24.29, 24.96, 25.04),
    "log": (33.62, 24.91, 25.17, 25.85),
    "mix": (33.46, 24.93, 25.27, 25.77),
}
COLUMNS = {("cos", "none"): "cos, no ReLU", ("sqcos", "none"): "sqcos, no ReLU"} | {
    ("cos", "relu"): "cos, ReLU",
    ("sqcos", "relu"): "sqcos, ReLU",
}


@register
def table3() -> Experiment:
    """CNN-9 with batch normalisation."""
    cells = []
    for row, values in PAPER.items():
        for ((angle, activation), column), paper in zip(COLUMNS.items(), values, strict=True):
            if paper is not None:
                operator = PLAIN if row == "baseline" else f"{row}-{angle}"
                # ReLU is the network's own, and a run that says so has another name than one that does not.
                changes = {} if activation == "relu" else {"activation": activation}
                cells.append(
                    Cell(row, column, recipe("paper-cifar", model="cnn9", operator=operator, **changes), paper)
                )
    return Experiment(
        "table3", "Table 3: CNN-9, CIFAR-100, test error in %", tuple(cells), order=tuple(COLUMNS.values())
    )
