"""A margin head with a small batch, in float64."""

import torch

from dcnet.losses import MarginSoftmax


def head_and_batch(margin, count=6, features=5, classes=4, seed=0, **options):
    torch.manual_seed(seed)
    options.setdefault("annealing", None)
    head = MarginSoftmax(features, classes, margin, **options).double()
    if head.bias is not None:
        torch.nn.init.normal_(head.bias)
    return head, torch.randn(count, features, dtype=torch.float64), torch.randint(classes, (count,))
