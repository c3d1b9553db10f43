"""Gradual conversion of pretrained models: (1 - t) * plain + t * decoupled, with t from 0 to 1 during training."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from dcnet.checks import check_whole
from dcnet.layers import Decoupled, check_settings


def blended_layers(model: nn.Module) -> dict[str, Decoupled]:
    """The layers that blend with the plain layer, by name."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, Decoupled)}
    return {name: layer for name, layer in found.items() if "blend" in layer._buffers}


class BlendSchedule:
    """Moves the blend of all layers from `start` to `end` in equal steps; call `step()` after each optimizer step.

    The blend is a tensor changed in place, so a compiled network is not recompiled. The plain layers are computed until
    `finish_blend_` is called.
    """

    def __init__(self, model: nn.Module, steps: int, start: float = 0.0, end: float = 1.0):
        check_settings(0, start)
        check_settings(0, end)
        check_whole("steps", steps, least=1)
        self.layers = list(blended_layers(model).values())
        if not self.layers:
            raise ValueError("the network has no blended layer: convert it with decouple(..., blend=0.0)")
        self.steps, self.start, self.end, self.taken = steps, start, end, 0
        self._fill()

    @property
    def value(self) -> float:
        """The current t."""
        fraction = self.taken / self.steps
        return (1 - fraction) * self.start + fraction * self.end

    def step(self) -> None:
        """Advances by one step; after the last step t stays at `end`."""
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
            if "blend" in layer._buffers:  # removed by finish_blend_
                layer.get_buffer("blend").fill_(self.value)


def finish_blend_(model: nn.Module) -> None:
    """Makes layers whose blend has reached 1 purely decoupled, so that the plain layer is no longer computed."""
    layers = blended_layers(model)
    for name, layer in layers.items():
        if layer.get_buffer("blend") != 1:
            raise ValueError(f"the blend of {name!r} must be 1, not {layer.get_buffer('blend').item():g}")
    for layer in layers.values():
        drop_blend_(layer)


def drop_blend_(layer: Decoupled) -> None:
    """Makes a blended layer purely decoupled."""
    layer._buffers.pop("blend", None)
