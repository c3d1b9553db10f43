"""Table 4: every magnitude and angle in a residual network."""

from dcnet.experiments.experiment import Cell, Experiment, register
from dcnet.operator import PLAIN
from dcnet.training import recipe

ANGLES = ("linear", "cos", "sqcos")
PAPER: dict[str, tuple[float | None, ...]] = {
    "baseline": (None, 26.69, None),
    "sphere": (21.79, 21.44, 24.40),
    "ball": (21.44, 21.12, 24.31),
    "tanh": (21.6, 21.17, 24.77),
    "linear": (21.09, 22.17, 21.31),
    "seg": (20.86, 20.91, 20.88),
    "log": (21.84, 21.08, 22.86),
    "mix": (21.02, 21.28, 21.81),
}


@register
def table4() -> Experiment:
    """ResNet-32 on CIFAR-100."""
    cells = []
    for row, values in PAPER.items():
        for angle, paper in zip(ANGLES, values, strict=True):
            if paper is not None:
                operator = PLAIN if row == "baseline" else f"{row}-{angle}"
                cells.append(Cell(row, angle, recipe("paper-cifar", operator=operator), paper))
    return Experiment("table4", "Table 4: ResNet-32, CIFAR-100, test error in %", tuple(cells), order=ANGLES)
