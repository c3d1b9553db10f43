"""Table 6: ImageNet."""

from typing import Any

from dcnet.experiments.experiment import NOT_CONVERGED, Cell, Experiment, register
from dcnet.operator import PLAIN
from dcnet.training import recipe

COLUMNS: dict[str, dict[str, Any]] = {
    "standard, BN": {"model": "resnet18"},
    "modified, BN": {"model": "resnet18-modified"},
    "modified, no BN": {"model": "resnet18-modified", "norm": "none"},
}
PAPER: dict[str, tuple[float | str, ...]] = {
    "baseline": (12.63, 12.10, NOT_CONVERGED),
    "sphere": (12.68, 11.55, 13.30),
    "linear": (11.99, 11.50, NOT_CONVERGED),
    "tanh": (12.47, 11.10, 12.79),
}


@register
def table6() -> Experiment:
    """ResNet-18 on ImageNet."""
    cells = [
        Cell(
            row,
            column,
            recipe("paper-imagenet", operator=PLAIN if row == "baseline" else f"{row}-cos", **changes),
            paper,
        )
        for row, values in PAPER.items()
        for (column, changes), paper in zip(COLUMNS.items(), values, strict=True)
    ]
    notes = (
        "In the standard network the paper starts the decoupled ones from the plain one, as --pretrained does.",
        "The paper's numbers are top-5 errors; runs record top-1.",
    )
    reason = "it needs ImageNet, 1.3 million images: train/<class>/*.jpg and val/<class>/*.jpg"
    title = "Table 6: ResNet-18, ImageNet, top-5 error of the centre crop in %"
    return Experiment("table6", title, tuple(cells), not_run=reason, notes=notes)
