"""Table 5: a decoupled network of 32 layers beside much deeper ones."""

from dcnet.experiments.experiment import Cell, Experiment, register
from dcnet.training import recipe

QUOTED = {
    "ResNet-110": {"cifar10": 6.61, "cifar100": 25.16},
    "ResNet-1001": {"cifar10": 4.92, "cifar100": 22.71},
    "ResNet-1001, batch 64": {"cifar10": 4.64},
}
OURS = {
    "tanh-cos": {"cifar10": 4.75, "cifar100": 21.12},
    "linear-sqcos": {"cifar10": 5.34, "cifar100": 20.23},
}


@register
def table5() -> Experiment:
    """DCNet-32 on CIFAR-10 and CIFAR-100."""
    quoted = [Cell(row, data, None, paper) for row, values in QUOTED.items() for data, paper in values.items()]
    ours = [
        Cell(f"DCNet-32, {operator}", dataset, recipe("paper-cifar", dataset=dataset, operator=operator), paper)
        for operator, values in OURS.items()
        for dataset, paper in values.items()
    ]
    notes = ("The paper quotes the rows of ResNet-110 and ResNet-1001 from their authors; they are not run here.",)
    return Experiment("table5", "Table 5: beside deeper networks, test error in %", (*quoted, *ours), notes=notes)
