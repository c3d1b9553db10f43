"""A margin head with a small batch, in float64, and specs of adaptive margins."""

import torch

from dcnet.losses import MarginSoftmax
from helpers.margins_in_loops import normal_numbers

# With statistics and limits near the norms of small batches.
ADAPTIVE = (
    "adaface(h=2,momentum=0.5)",
    "magface(l_a=1.5,u_a=3)",
    "curricularface(momentum=0.5)",
    "elastic-arcface(sigma=0.3)",
    "elastic-cosface",
    "subcenter-arcface(k=2)",
    "uniface",
)


def head_and_batch(margin, count=6, features=5, classes=4, seed=0, **options):
    torch.manual_seed(seed)
    options.setdefault("annealing", None)
    head = MarginSoftmax(features, classes, margin, **options).double()
    if head.bias is not None:
        torch.nn.init.normal_(head.bias)
    return head, torch.randn(count, features, dtype=torch.float64), torch.randint(classes, (count,))


def loop_options(head, count):
    """What `loss_of` needs of a head after a training batch of this size: with the state that the batch had."""
    state = {name: head.get_buffer(name).item() for name in head.state_names}
    return {
        "weights": head.weight.tolist(),
        "bias": None if head.bias is None else head.bias.tolist(),
        "scale": head.scale.fixed,
        "offset": 0.0 if head.offset is None else head.offset.item(),
        "state": state,
        "noise": normal_numbers(state["draws"], count) if "draws" in state else None,
    }
