"""All that a run changes, as tensors by name: the weights, and what the optimizer remembers of each."""

from collections.abc import Mapping, MutableMapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcnet.layers import Decoupled

MODEL, OPTIMIZER = "model.", "optimizer."


def gather(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Everything, whole: what processes hold in shares is put together, so that all of them have to call this."""
    found = {MODEL + name: whole(value) for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f"{OPTIMIZER}{name}.{key}"] = whole(value)
    return found


@torch.no_grad()
def restore_(model: nn.Module, optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Puts everything back in its place, in the layout and the shares that model and optimizer have now."""
    load_weights_(model, {name: value for name, value in tensors.items() if name.startswith(MODEL)})
    for name, parameter in model.named_parameters():
        start = f"{OPTIMIZER}{name}."
        kept = {key.removeprefix(start): value for key, value in tensors.items() if key.startswith(start)}
        # Names may start alike, but what an optimizer remembers has no points in its name.
        own = {key: _placed(value, parameter) for key, value in kept.items() if "." not in key}
        if own:
            optimizer.state[parameter] = own


@torch.no_grad()
def load_weights_(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copies weights and buffers, with or without `model.` in front of their names, into those of the model."""
    given = {name.removeprefix(MODEL): value for name, value in tensors.items()}
    add_missing_counts(model, given)
    own = model.state_dict()
    if own.keys() != given.keys():
        missing, strange = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
        raise ValueError(f"the weights are of another network: it lacks {missing[:3]} and has {strange[:3]} instead")
    for name, value in own.items():
        if value.shape != given[name].shape:
            raise ValueError(
                f"{name!r} is {list(value.shape)} in this network and {list(given[name].shape)} in the file"
            )
        value.copy_(_placed(given[name].to(value.dtype), value))


def add_missing_counts(model: nn.Module, state: MutableMapping[str, Tensor]) -> None:
    """Adds to a state dict the counts of batches that checkpoints of older versions do not have."""
    for name, layer in model.named_modules():
        if isinstance(layer, Decoupled):
            layer.add_missing_count(state, f"{name}." if name else "")


def whole(value: Tensor) -> Tensor:
    """The tensor, put together where processes hold it in shares; all of them have to call this."""
    gathered = getattr(value.detach(), "full_tensor", None)
    return value.detach() if gathered is None else gathered()


def _placed(value: Tensor, like: Tensor) -> Tensor:
    """The tensor on the device of another, and in its shares where it is one that is shared out."""
    if not hasattr(like, "device_mesh"):
        # In the same layout in memory, too, which fused optimizers insist on.
        same = value.shape == like.shape
        return torch.empty_like(like, dtype=value.dtype).copy_(value) if same else value.to(like.device, copy=True)
    from torch.distributed.tensor import distribute_tensor

    if value.dim() == 0:
        return value.to(like.device, copy=True)
    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return distribute_tensor(value.to(like.device), mesh, placements)
