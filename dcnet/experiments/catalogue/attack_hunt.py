"""The hunt for the setup of Tables 7 and 8: other attacks and trainings, compared with the paper's accuracies."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dcnet.experiments.catalogue.attack_tables import (
    BIM_STEPS,
    BLACK,
    CLEAN,
    EPSILON,
    OPERATORS,
    SOURCE_SEEDS,
    WHITE,
    load_test_images,
    predictions,
    source_of,
)
from dcnet.experiments.experiment import Cell, Experiment, register, register_evaluation
from dcnet.modes import batch_statistics
from dcnet.operator import PLAIN
from dcnet.robustness import accuracy, perturb
from dcnet.robustness.task import BATCH
from dcnet.training import Record, Run, RunConfig, load_model, recipe

RECIPE = "paper-attack"


@dataclass(frozen=True)
class Variant:
    """Another way to attack a trained network.

    Attributes:
        own_answers: move images away from the answers of the attacked network instead of the labels.
        loss: the loss that the attack maximizes, see `dcnet.robustness.attacks`.
        in_batches: the attacked network uses the statistics of each batch instead of running ones.
        plain_source: transfer from a plain network; otherwise from one with the operator of the attacked network.
    """

    own_answers: bool = False
    loss: str = "ce"
    in_batches: bool = False
    plain_source: bool = True

    def source_of(self, attacked: RunConfig) -> RunConfig:
        """Returns the config of the source network: trained like the attacked one, with another seed."""
        source = source_of(attacked)
        return source if self.plain_source else dataclasses.replace(source, operator=attacked.operator)

    def measure(self, model: nn.Module, images: Tensor, labels: Tensor, source: nn.Module) -> dict[str, Any]:
        """Returns accuracies without an attack, and under white-box and transferred attacks."""
        found: dict[str, Any] = {"epsilon": EPSILON, "steps": BIM_STEPS, "clean": accuracy(model, images, labels)}
        for box, attacked in (("white_box", model), ("black_box", source)):
            moved = {name: self.perturbed(model, images, labels, attacked, name) for name in ("fgsm", "bim")}
            found[box] = {name: accuracy(model, perturbed, labels) for name, perturbed in moved.items()}
        return found

    def perturbed(self, model: nn.Module, images: Tensor, labels: Tensor, attacked: nn.Module, name: str) -> Tensor:
        """Returns the images of an attack on `model` itself, or on a source network."""
        target = InBatches(attacked) if self.in_batches else attacked
        away_from = predictions(attacked, images) if self.own_answers else labels
        size = TRAINING_BATCH if self.in_batches else BATCH
        settings: dict[str, Any] = {"loss": self.loss, **({"steps": BIM_STEPS} if name == "bim" else {})}
        source = None if target is model else target
        return perturb(model, images, away_from, name, epsilon=EPSILON, source=source, batch_size=size, **settings)


# The batch size of training, whose statistics the attacked network sees.
TRAINING_BATCH = recipe(RECIPE).batch_size


class InBatches(nn.Module):
    """A network that normalizes with the statistics of each batch; a single image has none, and uses running ones."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, input: Tensor) -> Tensor:
        if len(input) == 1:
            return self.network(input)
        with batch_statistics(self.network):
            return self.network(input)


VARIANTS = {
    "hunt-own-answers": Variant(own_answers=True),
    "hunt-training-loss": Variant(loss="floored"),
    "hunt-batch-statistics": Variant(in_batches=True),
    "hunt-decoupled-source": Variant(plain_source=False),
}


def _register(name: str, variant: Variant) -> None:
    @register_evaluation(name)
    def evaluate(model: nn.Module, record: Record, runs: Path, data_dir: Path | None) -> dict[str, Any]:
        own, device = record.run_config(), next(model.parameters()).device
        source = load_model(Run.of(variant.source_of(own), runs))[0].to(device)
        return variant.measure(model, *load_test_images(own, data_dir, device), source)


for _name, _variant in VARIANTS.items():
    _register(_name, _variant)


@dataclass(frozen=True)
class Setting:
    """A way in which the paper's setup may differ from that of Tables 7 and 8.

    Attributes:
        evaluation: the evaluation of the attacks.
        changes: changes to the recipe.
        operators: the operators by column; columns without one have the result of the first setting.
    """

    evaluation: str = "attacks"
    changes: Mapping[str, Any] = field(default_factory=dict)
    operators: Mapping[str, str] = field(default_factory=lambda: OPERATORS)

    def config(self, network: str) -> RunConfig:
        return recipe(RECIPE, operator=self.operators[network], **self.changes)


DECOUPLED = {name: operator for name, operator in OPERATORS.items() if operator != PLAIN}
FLIPS = {"augmentation": dataclasses.replace(recipe(RECIPE).augmentation, pad=0)}
BARE = {"model": "cnn9-small-bare"}
FIXED = "radius=Radius(learnable=False)"
# The cheapest first: other attacks on the same networks, then other operators, then other trainings of all networks.
SETTINGS = {
    "as in Tables 7 and 8": Setting(),
    "attack on own answers": Setting("hunt-own-answers"),
    "attack on the training loss": Setting("hunt-training-loss"),
    "batch statistics": Setting("hunt-batch-statistics"),
    "decoupled source": Setting("hunt-decoupled-source", operators=DECOUPLED),
    "fixed radius": Setting(operators={name: f"{name}({FIXED})-cos" for name in ("ball", "tanh")}),
    "fixed, absolute radius": Setting(operators={name: f"{name}(radius=1)-cos" for name in ("ball", "tanh")}),
    "square cosine": Setting(operators={name: f"{name}-sqcos" for name in DECOUPLED}),
    "flips only": Setting(changes=FLIPS),
    "flips only, bare": Setting(changes={**FLIPS, **BARE}),
    "no batch normalization": Setting(changes={"norm": "none"}),
    "no ReLU": Setting(changes={"activation": "none"}),
    "no smoothing, no floor": Setting(changes={"label_smoothing": 0.0, "log_floor": 0.0}),
}
# By measure: its place in the evaluation, and the paper's accuracies of naturally trained networks.
MEASURES: dict[str, tuple[tuple[str, ...], tuple[float, ...]]] = {
    "clean": (("clean",), CLEAN["natural"]),
    "FGSM": (("white_box", "fgsm"), WHITE["natural", "fgsm"]),
    "BIM": (("white_box", "bim"), WHITE["natural", "bim"]),
    "black-box FGSM": (("black_box", "fgsm"), BLACK["natural", "fgsm"]),
}
NOTES = (
    f"Epsilon {EPSILON * 255:g}/255; BIM takes {BIM_STEPS} steps. An empty cell has the network of the first setting, "
    "as in the natural rows of Tables 7 and 8. Bare: without batch normalization and ReLU after the fully "
    "connected layer. Batch statistics: of the attacked network during the attack.",
)


def _cells(name: str, setting: Setting) -> list[Cell]:
    """Returns the rows of a setting, one per measure."""
    return [
        Cell(
            row=f"{name}: {measure}",
            column=network,
            config=setting.config(network),
            paper=dict(zip(OPERATORS, paper, strict=True))[network],
            metric=("evaluations", setting.evaluation, *path),
            factor=100.0,
            evaluation=setting.evaluation,
        )
        for measure, (path, paper) in MEASURES.items()
        for network in setting.operators
    ]


def _sources(name: str, setting: Setting) -> list[Cell]:
    """Returns cells of the source networks of a setting, so that these are trained."""
    variant = VARIANTS.get(setting.evaluation, Variant())
    found: dict[RunConfig, Cell] = {}
    for network in setting.operators:
        config = dataclasses.replace(variant.source_of(setting.config(network)), seed=0)
        place = (f"{name}: source, clean", "baseline" if config.operator == PLAIN else network)
        found[config] = Cell(*place, config, metric=("results", "test_accuracy"), first_seed=SOURCE_SEEDS)
    return list(found.values())


@register
def attack_hunt() -> Experiment:
    """Other attacks and trainings that may explain the differences of Tables 7 and 8 from the paper."""
    cells: list[Cell] = []
    for name, setting in SETTINGS.items():
        # Several settings may share a source.
        trained = {cell.config for cell in cells if cell.first_seed == SOURCE_SEEDS}
        cells += [cell for cell in _sources(name, setting) if cell.config not in trained]
        cells += _cells(name, setting)
    title = "Hunt for the setup of the paper's Tables 7 and 8: CIFAR-10, natural training, accuracy in %"
    return Experiment("attack_hunt", title, tuple(cells), higher_is_better=True, hunt=True, notes=NOTES)
