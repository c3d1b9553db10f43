"""What sets the size of an operator's output, found by trying it out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dcnet.learnable import Learnable
from dcnet.magnitude import Sum
from dcnet.operator import Operator
from dcnet.part import Value

# Norms of filters (columns) and patches on which an operator is tried out.
FILTER_NORMS = torch.tensor([0.1, 1.0, 7.0], dtype=torch.float64)
PATCH_NORMS = torch.tensor([[0.01], [0.3], [1.0], [5.0], [100.0]], dtype=torch.float64)


def calibratable(operator: Operator) -> Operator:
    """The operator with what sets its size learned per channel, or as it is if it starts as the plain layer."""
    if is_plain_at_start(operator):
        return operator
    names = size_constants(operator)
    parts: list[Any] = []
    for held in operator._magnitudes:
        slots = {own: operator.slots[name] for own, name in held.names.items() if name in names}
        learned: dict[str, Any] = {
            own: Learnable(slot.init, per_channel=True, floor=slot.floor) for own, slot in slots.items()
        }
        parts.append(dataclasses.replace(held.part, **learned))
    magnitude = parts[0] if len(parts) == 1 else Sum(tuple(parts))
    return Operator(magnitude, operator.angle, operator.weighting)


def is_plain_at_start(operator: Operator) -> bool:
    """Whether a new layer of the operator computes ||w|| ||x|| cos(theta), as `linear-cos+linear` does."""
    size = _size(operator, operator.constants({}))
    return operator.angle.identity and torch.allclose(size, FILTER_NORMS * PATCH_NORMS)


def size_constants(operator: Operator) -> list[str]:
    """The constants with which the size of the output doubles: the scales, and the slopes where there are some."""
    owned = [(own, name) for held in operator._magnitudes for own, name in held.names.items()]
    scales = [name for own, name in owned if own == "scale"]
    all_but_radii = [name for own, name in owned if own != "radius"]
    start = operator.constants({})
    for names in (scales, all_but_radii):
        doubled = {name: 2 * value if name in names else value for name, value in start.items()}
        if names and torch.allclose(_size(operator, doubled), 2 * _size(operator, start)):
            return names
    raise ValueError(
        f"{str(operator)!r} cannot be calibrated, since no scale sets the size of its output: start it as is, "
        "or use a magnitude that has a scale"
    )


def _size(operator: Operator, constants: Mapping[str, Value]) -> Tensor:
    """h(||w||, ||x||) at the norms to try."""
    h = operator.h(operator.weighting.argument(FILTER_NORMS, PATCH_NORMS), constants)
    factor = operator.weighting.factor(FILTER_NORMS, lambda n: operator.h(n, constants), operator.alpha(constants))
    return h * factor + 0 * FILTER_NORMS
