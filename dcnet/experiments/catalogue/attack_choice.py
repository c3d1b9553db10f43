"""Which epsilon, and how many steps? The paper does not say what its attacks had."""

from pathlib import Path
from typing import Any

from torch import nn

from dcnet.experiments.catalogue import attacks
from dcnet.experiments.evaluations import register as register_evaluation
from dcnet.experiments.experiment import Cell, Experiment, register
from dcnet.robustness.report_card import evaluate_attacks
from dcnet.training import Run, config_of, load_model

# In parts of 255.
EPSILONS, STEPS = (2, 3, 4, 5, 6, 7, 8), (2, 3, 5, 10)
IMAGES = 1000
EVALUATION = "attack-choice"


@register_evaluation(EVALUATION)
def choices_of(model: nn.Module, record: dict[str, Any], runs: Path, data_dir: Path | None) -> dict[str, Any]:
    """The attacks of Tables 7 and 8 by epsilon and steps, and how far they are from the paper's."""
    own, device = config_of(record["config"]), next(model.parameters()).device
    source = load_model(Run.of(attacks.source_of(own), runs))[0].to(device)
    images, labels = attacks.images_to_attack(own, data_dir, device)
    images, labels = images[:IMAGES], labels[:IMAGES]
    found: dict[str, Any] = {"images": len(images)}
    for epsilon in EPSILONS:
        for steps in STEPS:
            tried = evaluate_attacks(model, images, labels, source, epsilon=epsilon / 255, steps=steps)
            found.setdefault(f"{epsilon}/255", {})[str(steps)] = {**tried, "distance": distance(tried)}
    return found


def distance(tried: dict[str, Any]) -> float:
    """From the four numbers of the paper's plain, naturally trained network, in sum."""
    boxes = {"white_box": attacks.WHITE, "black_box": attacks.BLACK}
    return sum(
        abs(tried[box][attack] - paper["natural", attack][0] / 100)
        for box, paper in boxes.items()
        for attack in ("fgsm", "bim")
    )


@register
def attack_choice() -> Experiment:
    """Epsilons and steps for Tables 7 and 8."""
    plain = attacks.config("baseline", "natural")
    tried = [
        Cell(
            row=f"{epsilon}/255",
            column=f"{steps} steps",
            config=plain,
            metric=("evaluations", EVALUATION, f"{epsilon}/255", str(steps), "distance"),
            factor=100.0,
            evaluation=EVALUATION,
        )
        for epsilon in EPSILONS
        for steps in STEPS
    ]
    networks = (
        Cell("test error", "network", plain),
        Cell("test error", "its source", plain, first_seed=attacks.SOURCE_SEEDS),
    )
    title = (
        f"Epsilon and steps of BIM: how far the plain network is from the paper's, in points, {IMAGES:,} test images"
    )
    notes = ("The sum of four distances: of FGSM and BIM, each with and without knowing the network.",)
    return Experiment("attack_choice", title, (*tried, *networks), notes=notes)
