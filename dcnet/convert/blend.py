"""(1 - t) * plain + t * decoupled, with t going from 0 to 1 in training: a slow change for large pretrained models."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from dcnet.convert.swap import drop_blend_
from dcnet.layers import Decoupled, check_options


def blended_layers(model: nn.Module) -> dict[str, Decoupled]:
    """The layers that blend, by name."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, Decoupled)}
    return {name: layer for name, layer in found.items() if "blend" in layer._buffers}


class BlendSchedule:
    """Moves the blend of all layers from `start` to `end` in equal steps; call `step()` after each optimizer step.

    The blend is a tensor that is changed in place, so that a compiled network is not compiled again. At the end the
    plain layers are still computed, until `finish_blend_` is called.
    """

    def __init__(self, model: nn.Module, steps: int, start: float = 0.0, end: float = 1.0):
        check_options(0, start)
        check_options(0, end)
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps must be a whole number, 1 or more, not {steps!r}")
        self.layers = list(blended_layers(model).values())
        if not self.layers:
            raise ValueError("the network has no layer that blends: convert it with decouple(..., blend=0.0)")
        self.steps, self.start, self.end, self.taken = steps, start, end, 0
        self._fill()

    @property
    def value(self) -> float:
        """t as it is now."""
        fraction = self.taken / self.steps
        return (1 - fraction) * self.start + fraction * self.end

    def step(self) -> None:
        """One step on; after the last one nothing moves any more."""
        self.taken = min(self.taken + 1, self.steps)
        self._fill()

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.taken = min(max(state["taken"], 0), self.steps)
        self._fill()

    @torch.no_grad()
    def _fill(self) -> None:
        for layer in self.layers:
            if "blend" in layer._buffers:  # not so after finish_blend_
                layer.get_buffer("blend").fill_(self.value)


def finish_blend_(model: nn.Module) -> None:
    """Makes the layers whose blend has reached 1 purely decoupled: the plain layer is computed no more."""
    layers = blended_layers(model)
    for name, layer in layers.items():
        if layer.get_buffer("blend") != 1:
            raise ValueError(f"the blend of {name!r} is {layer.get_buffer('blend').item():g}, and must have reached 1")
    for layer in layers.values():
        drop_blend_(layer)
