"""How accuracy falls as the budget of an attack grows."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dcnet.robustness.accuracy import correct, share
from dcnet.robustness.attack import Attack, as_attack
from dcnet.robustness.draws import as_seed
from dcnet.robustness.perturbing import perturb
from dcnet.robustness.task import BATCH, checked_epsilon, checked_images, checked_labels, checked_targets, classes_of
from dcnet.robustness.undisturbed import undisturbed


@torch.inference_mode(False)
def curve(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    attack: Attack | str = "pgd",
    *,
    epsilons: Sequence[float],
    targets: Tensor | None = None,
    source: nn.Module | None = None,
    seed: int | torch.Generator = 0,
    batch_size: int = BATCH,
    compile: bool = False,
    each: Callable[[float, float], object] | None = None,
    **settings: Any,
) -> list[float]:
    """The accuracies at each epsilon, in their order.

    An attack that searches goes on with those images that it has not broken at a smaller epsilon, since what it has
    found there lies within the larger one, too: the accuracies then never rise with epsilon.

    Args:
        model: the network, as all else that is not said here, is that of `perturb`.
        x: images.
        y: their labels.
        attack: a name of the registry, or an Attack.
        epsilons: in any order; 0 gives the accuracy without an attack.
        targets: what the images are to be taken for.
        source: makes the images; the model is only asked in the end, so that each epsilon stands for itself.
        seed: the same for all epsilons, also where it is a generator.
        batch_size: how many images are attacked at once.
        compile: compiles the steps.
        each: is told every epsilon and its accuracy as soon as it is known, from the smallest epsilon on.
        settings: of the attack.
    """
    chosen, images = as_attack(attack, **settings), checked_images(x)
    budgets = [checked_epsilon(epsilon, chosen.norm, images) for epsilon in epsilons]
    if not budgets:
        raise ValueError("epsilons must be one number or more, and there is none")
    labels, aims = _checked(model, images, y, targets)
    options: dict[str, Any] = {
        "source": source,
        "seed": as_seed(seed),
        "batch_size": batch_size,
        "compile": compile,
    }
    right, found = torch.ones(len(images), dtype=torch.bool, device=images.device), {}
    for epsilon in sorted(set(budgets)):
        left = right if chosen.searching and source is None else torch.ones_like(right)
        if left.any():
            part = None if aims is None else aims[left]
            moved = perturb(model, images[left], labels[left], chosen, epsilon=epsilon, targets=part, **options)
            right = left.masked_scatter(left, correct(model, moved, labels[left], batch_size=batch_size))
        found[epsilon] = share(right)
        if each is not None:
            each(epsilon, found[epsilon])
    return [found[epsilon] for epsilon in budgets]


def _checked(model: nn.Module, images: Tensor, y: Tensor, targets: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Labels and targets beside the images."""
    with undisturbed(model):
        classes = classes_of(model, images)
    labels = checked_labels("labels", y, len(images), classes).to(images.device)
    return labels, checked_targets(targets, labels, classes)
