"""Tables 1 to 5: test errors on CIFAR-10 and CIFAR-100, and ablations of the paper's recipe."""

from typing import Any

from dcnet.experiments.experiment import NOT_CONVERGED, Cell, Columns, Experiment, paper_grid, register
from dcnet.operator import PLAIN
from dcnet.training import RunConfig, recipe

RECIPE = "paper-cifar"
NO_RELU: dict[str, Any] = {"activation": "none"}
NO_PROJECTION: dict[str, Any] = {"projection_every": 0}
UNDECAYED: dict[str, Any] = {**NO_PROJECTION, "decay_weighted": False}
NO_CONSTRAINT: dict[str, Any] = {"orthonormal": 0.0}
ANGLES: Columns = {angle: (angle, {}) for angle in ("linear", "cos", "sqcos")}


# By row: the paper's error, the operator, and changes to the recipe. Rows without an error are not in the paper. It
# does not say whether weighted filters decay, or how gradients are weighted under Adam, which nearly cancels a factor
# on the gradient.
TABLE_1: dict[str, tuple[float | None, str, dict[str, Any]]] = {
    "linearly weighted": (22.95, "tanh-cos+linear", NO_PROJECTION),
    "linearly weighted, no decay": (None, "tanh-cos+linear", UNDECAYED),
    "weighted, Eq. 15": (23.03, "tanh-cos+joint", NO_PROJECTION),
    "weighted, Eq. 15, no decay": (None, "tanh-cos+joint", UNDECAYED),
    "weighted, Eq. 16": (23.38, "tanh-cos+product", NO_PROJECTION),
    "weighted, Eq. 16, no decay": (None, "tanh-cos+product", UNDECAYED),
    "standard gradients": (23.09, "tanh-cos", NO_PROJECTION),
    "weight projection": (21.17, "tanh-cos", {}),
    "weighted gradients": (21.45, "tanh-cos", {**NO_PROJECTION, "weighted_gradients": "gradient"}),
    "weighted gradients, on the update": (None, "tanh-cos", {**NO_PROJECTION, "weighted_gradients": "update"}),
}


@register
def table1() -> Experiment:
    """TanhConv in ResNet-32: weightings, and remedies for gradients that shrink as filter norms grow."""
    cells = tuple(
        Cell(row, "tanh-cos", recipe(RECIPE, operator=operator, **changes), paper)
        for row, (paper, operator, changes) in TABLE_1.items()
    )
    notes = ("No decay: of the filters of weighted layers. All other parameters decay in every row.",)
    return Experiment("table1", "Table 1: TanhConv in ResNet-32, CIFAR-100, test error in %", cells, notes=notes)


TABLE_2 = {
    "baseline": (None, 35.30, None),
    "linear": (33.39, 31.76, NOT_CONVERGED),
    "tanh": (32.88, 31.88, 34.26),
    "seg": (34.69, 30.34, NOT_CONVERGED),
}


@register
def table2() -> Experiment:
    """CNN-9 with ReLU and without batch normalization."""
    cells = paper_grid(RECIPE, ANGLES, TABLE_2, {"model": "cnn9", "norm": "none"})
    title = "Table 2: CNN-9 without batch normalization, CIFAR-100, test error in %"
    return Experiment("table2", title, cells, order=tuple(ANGLES))


# Columns with ReLU use the default of the network; setting it explicitly would change the hash of the runs.
TABLE_3_COLUMNS: Columns = {
    "cos, no ReLU": ("cos", NO_RELU),
    "sqcos, no ReLU": ("sqcos", NO_RELU),
    "cos, ReLU": ("cos", {}),
    "sqcos, ReLU": ("sqcos", {}),
}
TABLE_3 = {
    "baseline": (58.24, None, 26.01, None),
    "sphere": (33.31, 25.90, 26.00, 26.97),
    "ball": (31.81, 25.43, 25.18, 26.48),
    "tanh": (32.27, 25.27, 25.15, 26.94),
    "linear": (36.49, 24.36, 24.81, 25.14),
    "seg": (33.57, 24.29, 24.96, 25.04),
    "log": (33.62, 24.91, 25.17, 25.85),
    "mix": (33.46, 24.93, 25.27, 25.77),
}


@register
def table3() -> Experiment:
    """CNN-9 with batch normalization, with and without ReLU."""
    cells = paper_grid(RECIPE, TABLE_3_COLUMNS, TABLE_3, {"model": "cnn9"})
    title = "Table 3: CNN-9, CIFAR-100, test error in %"
    return Experiment("table3", title, cells, order=tuple(TABLE_3_COLUMNS))


TABLE_4 = {
    "baseline": (None, 26.69, None),
    "sphere": (21.79, 21.44, 24.40),
    "ball": (21.44, 21.12, 24.31),
    "tanh": (21.60, 21.17, 24.77),
    "linear": (21.09, 22.17, 21.31),
    "seg": (20.86, 20.91, 20.88),
    "log": (21.84, 21.08, 22.86),
    "mix": (21.02, 21.28, 21.81),
}


@register
def table4() -> Experiment:
    """ResNet-32 on CIFAR-100."""
    cells = paper_grid(RECIPE, ANGLES, TABLE_4)
    return Experiment("table4", "Table 4: ResNet-32, CIFAR-100, test error in %", cells, order=tuple(ANGLES))


# By row: the operator, and the paper's errors on CIFAR-10 and CIFAR-100; without an operator, the paper quotes them.
TABLE_5: dict[str, tuple[str | None, dict[str, float]]] = {
    "ResNet-110": (None, {"cifar10": 6.61, "cifar100": 25.16}),
    "ResNet-1001": (None, {"cifar10": 4.92, "cifar100": 22.71}),
    "ResNet-1001, batch 64": (None, {"cifar10": 4.64}),
    "DCNet-32, tanh-cos": ("tanh-cos", {"cifar10": 4.75, "cifar100": 21.12}),
    "DCNet-32, linear-sqcos": ("linear-sqcos", {"cifar10": 5.34, "cifar100": 20.23}),
}


def dcnet32(operator: str, dataset: str) -> RunConfig:
    """Returns the config of a network of Table 5: ResNet-32 with the weight-normalized softmax."""
    return recipe(RECIPE, dataset=dataset, operator=operator, classifier="normalized")


@register
def table5() -> Experiment:
    """DCNet-32 with weight-normalized softmax, compared with deeper networks, on CIFAR-10 and CIFAR-100."""
    cells = tuple(
        Cell(row, data, None if operator is None else dcnet32(operator, data), paper)
        for row, (operator, values) in TABLE_5.items()
        for data, paper in values.items()
    )
    notes = ("The paper quotes the rows of ResNet-110 and ResNet-1001 from their authors; they are not run here.",)
    return Experiment("table5", "Table 5: comparison with deeper networks, test error in %", cells, notes=notes)


NETWORKS: dict[str, dict[str, Any]] = {
    "CNN-9": {"model": "cnn9"},
    "CNN-9, no ReLU": {"model": "cnn9", **NO_RELU},
    "ResNet-32": {"model": "resnet32"},
}
# The two cells of Table 3 that differ from the paper by more than a point. By row: the operator, and a change to the
# recipe that may explain the difference. All rows have the paper's number of the cell.
PLAIN_OUTLIER: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": (PLAIN, {}),
    "no normalization, no floor, variance kept": (PLAIN, {"norm": "none", "log_floor": 0.0, "init_variance": 1.0}),
    "decay 5e-3": (PLAIN, {"weight_decay": 5e-3}),
    "bare fully connected layer": (PLAIN, {"model": "cnn9-bare"}),
}
MIX_OUTLIER: dict[str, tuple[str, dict[str, Any]]] = {
    "mix-cos": ("mix-cos", {}),
    "alpha 0.1": ("mix(scale=0.1)-cos", {}),
    "alpha 0.01": ("mix(scale=0.01)-cos", {}),
    "bare fully connected layer": ("mix-cos", {"model": "cnn9-bare"}),
}
OUTLIER_NOTES = (
    "A bare fully connected layer has no batch normalization.",
    "Variance kept: initial weights from N(0, 1 / (k k c_in)), which keep the variance without ReLU. No floor: no 1e-4 "
    "inside the logarithm of the loss.",
)


def _outlier_cells(row: str, settings: dict[str, tuple[str, dict[str, Any]]]) -> tuple[Cell, ...]:
    column, paper = "cos, no ReLU", TABLE_3[row][0]
    base = {"model": "cnn9", **NO_RELU}
    return tuple(
        Cell(name, column, recipe(RECIPE, operator=operator, **{**base, **changes}), paper)
        for name, (operator, changes) in settings.items()
    )


@register
def plain_outlier() -> Experiment:
    """The plain network without ReLU of Table 3, with changes that may explain the difference from the paper."""
    title = "Plain CNN-9 without ReLU, with changes: CIFAR-100, test error in %"
    return Experiment("plain_outlier", title, _outlier_cells("baseline", PLAIN_OUTLIER), notes=OUTLIER_NOTES)


@register
def mix_outlier() -> Experiment:
    """`mix-cos` without ReLU of Table 3, with changes that may explain the difference from the paper."""
    title = "CNN-9 with mix-cos, without ReLU, with changes: CIFAR-100, test error in %"
    return Experiment("mix_outlier", title, _outlier_cells("mix", MIX_OUTLIER), seeds=3, notes=OUTLIER_NOTES[:1])


# By row: the operator, changes to the recipe, and the columns.
ABLATIONS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "plain": (PLAIN, {}, ("CNN-9", "CNN-9, no ReLU", "ResNet-32")),
    "plain, no decay": (PLAIN, {"weight_decay": 0.0}, ("CNN-9",)),
    "plain, no normalization": (PLAIN, {"norm": "none"}, ("CNN-9", "CNN-9, no ReLU")),
    "linear-cos": ("linear-cos", {}, ("CNN-9", "CNN-9, no ReLU", "ResNet-32")),
    "linear-cos, no projection": ("linear-cos", NO_PROJECTION, ("CNN-9", "ResNet-32")),
    "linear-cos, no constraint": ("linear-cos", NO_CONSTRAINT, ("CNN-9",)),
    "linear-cos, neither": ("linear-cos", {**NO_PROJECTION, **NO_CONSTRAINT}, ("CNN-9",)),
    "mix-cos": ("mix-cos", {}, ("CNN-9", "CNN-9, no ReLU")),
    "mix-cos, alpha 0.1": ("mix(scale=0.1)-cos", {}, ("CNN-9, no ReLU",)),
}


@register
def causes() -> Experiment:
    """Ablations of the paper's recipe, for CNN-9 and ResNet-32."""
    cells = tuple(
        Cell(row, column, recipe(RECIPE, operator=operator, **changes, **NETWORKS[column]))
        for row, (operator, changes, columns) in ABLATIONS.items()
        for column in columns
    )
    title = "Ablations of the paper's recipe: CIFAR-100, test error in %"
    notes = (
        "With batch normalization, linear-cos can represent the same functions as the plain network. They differ in "
        "training: weight decay, projection, and the orthonormal constraint.",
    )
    return Experiment("causes", title, cells, tuple(NETWORKS), notes=notes)
