"""Images that an attack makes, with the network itself or with another one in its place."""

from typing import Any

import torch
from torch import Tensor, nn

from dcnet.robustness.attack import Attack, as_attack
from dcnet.robustness.task import BATCH, checked_images, classes_of, make_task
from dcnet.robustness.undisturbed import undisturbed


@torch.inference_mode(False)
@torch.no_grad()
def perturb(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    attack: Attack | str = "pgd",
    *,
    epsilon: float,
    targets: Tensor | None = None,
    source: nn.Module | None = None,
    seed: int | torch.Generator = 0,
    batch_size: int = BATCH,
    compile: bool = False,
    **settings: Any,
) -> Tensor:
    """The images that an attack makes of x, from 0 to 1 and no farther from it than epsilon.

    Args:
        model: from pixels to logits [N, classes]; its normalisation is its own. It is attacked in evaluation mode, and
            is left as it was.
        x: images [N, ...], float from 0 to 1 or uint8; on any device, and so are the images found.
        y: their labels, int [N].
        attack: a name of the registry, or an Attack.
        epsilon: the largest perturbation, in the norm of the attack.
        targets: what the images are to be taken for, int [N]; None for anything but the label.
        source: a network that the attack takes for the model, which it then knows nothing of. Each image is moved as
            far as the attack goes: one that just breaks the source would hardly break anything else.
        seed: of all chance; the same seed finds the same images, in batches of any size, but for rounding. Only square
            and autoattack draw by the batch, so that with them another batch_size finds others.
        batch_size: how many images are attacked at once.
        compile: compiles the steps, which is worth its minute in long attacks on a GPU.
        settings: of the attack, such as norm="l2" or steps=50.
    """
    chosen = as_attack(attack, **settings)
    if targets is not None and not chosen.takes_targets:
        raise ValueError(f"{chosen.name} does not take targets: use pgd")
    if source is not None:
        chosen = chosen.at_full_strength()
        check_source(model, source, x)
    attacked = model if source is None else source
    with undisturbed(attacked):
        task = make_task(attacked, x, y, chosen.norm, epsilon, targets, seed, batch_size, compile)
        return task.x if task.epsilon == 0 else chosen.images(task)


def check_source(model: nn.Module, source: nn.Module, x: Tensor) -> None:
    """Refuses a source that does not tell the same classes apart."""
    images = checked_images(x[:1])
    with undisturbed(model), undisturbed(source):
        own, others = classes_of(model, images), classes_of(source, images)
    if own != others:
        raise ValueError(f"the source must know the {own} classes that the network has, and knows {others}")
