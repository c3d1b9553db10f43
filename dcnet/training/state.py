"""The state of training, of networks and optimizers: gathered or divided among processes, saved and restored."""

import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dcnet.checks import check_whole
from dcnet.layers import Decoupled
from dcnet.losses.collectives import rank_of
from dcnet.losses.sharded import ShardedMarginSoftmax, sharded_heads
from dcnet.training.processes import agree
from dcnet.training.shards import Part, Shards, check_parts
from dcnet.training.tensor_files import TensorFile, stream_tensors

MODEL, OPTIMIZER = "model.", "optimizer."
Networks = nn.Module | Mapping[str, nn.Module]
# The checkpoints of custom training loops that are kept.
KEPT = 2
_STEP = re.compile(r"step-(\d+)")
# Values of parameter groups that are saved, such as learning rates; others cannot change or are not plain.
PLAIN = (bool, int, float, str, type(None))


def gather(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Returns all tensors of network and optimizer, gathered if they are sharded; all processes must call this."""
    found = {MODEL + name: whole(value) for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f"{OPTIMIZER}{name}.{key}"] = whole(value)
    return found


@torch.no_grad()
def restore_(model: nn.Module, optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Copies gathered tensors into network and optimizer, keeping their memory layout and sharding."""
    load_weights_(model, {name: value for name, value in tensors.items() if name.startswith(MODEL)})
    for name, parameter in model.named_parameters():
        start = f"{OPTIMIZER}{name}."
        kept = {key.removeprefix(start): value for key, value in tensors.items() if key.startswith(start)}
        # Parameter names may share a prefix, but names of optimizer state have no dots.
        own = {key: _placed(value, parameter) for key, value in kept.items() if "." not in key}
        if own:
            optimizer.state[parameter] = own


@torch.no_grad()
def load_weights_(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copies weights and buffers into the model; names may have the prefix `model.`."""
    given = {name.removeprefix(MODEL): value for name, value in tensors.items()}
    for name, layer in model.named_modules():
        if isinstance(layer, Decoupled):
            # Files of older versions lack the count of batches.
            layer.add_missing_count(given, f"{name}." if name else "")
    own = model.state_dict()
    if own.keys() != given.keys():
        missing, unknown = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
        raise ValueError(f"the weights are of another network: they lack {missing[:3]} and have {unknown[:3]} instead")
    for name, value in own.items():
        if value.shape != given[name].shape:
            raise ValueError(
                f"{name!r} has the shape {list(value.shape)} in this network, but {list(given[name].shape)} in the file"
            )
        value.copy_(_placed(given[name].to(value.dtype), value))


def whole(value: Tensor) -> Tensor:
    """Returns the tensor, gathered if it is sharded; all processes must call this."""
    gathered = getattr(value.detach(), "full_tensor", None)
    return value.detach() if gathered is None else gathered()


def _placed(value: Tensor, like: Tensor) -> Tensor:
    """Returns a copy of the tensor on the device of `like`, and sharded like it."""
    if not hasattr(like, "device_mesh"):
        # Fused optimizers require the same memory layout.
        same = value.shape == like.shape
        return torch.empty_like(like, dtype=value.dtype).copy_(value) if same else value.to(like.device, copy=True)
    from torch.distributed.tensor import distribute_tensor

    if value.dim() == 0:
        return value.to(like.device, copy=True)
    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return distribute_tensor(value.to(like.device), mesh, placements)


def _owners(model: nn.Module) -> dict[str, ShardedMarginSoftmax]:
    """The sharded heads, by the names of their parameters that are divided among processes."""
    heads = sharded_heads(model).items()
    return {f"{name}.{inner}".removeprefix("."): head for name, head in heads for inner in head.divided}


def _divided(model: nn.Module) -> dict[str, tuple[int, int]]:
    """The names of parameters of sharded heads, with their first row and the rows of all processes."""
    return {name: head.divided[name.rpartition(".")[2]] for name, head in _owners(model).items()}


def parts_of(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Part]:
    """The parts of all tensors of network and optimizer that this process holds, by the names of `gather`."""
    divided = _divided(model)
    found = {MODEL + name: Part.of(value, *divided.get(name, ())) for name, value in model.state_dict().items()}
    state: Mapping[Any, Any] = {} if optimizer is None else optimizer.state
    for name, parameter in model.named_parameters():
        for key, value in state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                rows = _rows_of_state(name, parameter, key, value.shape) if name in divided else False
                found[f"{OPTIMIZER}{name}.{key}"] = Part.of(value, *divided[name] if rows else ())
    return found


def _rows_of_state(name: str, parameter: Tensor, key: str, shape: torch.Size) -> bool:
    """Whether a tensor of the optimizer has a row for each row of the parameter; a number belongs to all of them."""
    if len(shape) and shape[0] != len(parameter):
        raise ValueError(
            f"the state {key!r} of {name!r} has the shape {list(shape)}, which cannot be divided by classes: "
            f"expected {len(parameter)} rows, or a number"
        )
    return len(shape) > 0


def empty_state_(shards: Shards, model: nn.Module, optimizer: Optimizer) -> None:
    """Gives the optimizer empty tensors in the shapes of a checkpoint, for `load_parts`."""
    divided, sizes = _divided(model), shards.sizes
    on_device = {
        id(parameter): bool(group.get("capturable") or group.get("fused"))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for name, parameter in model.named_parameters():
        start, own = f"{OPTIMIZER}{name}.", {}
        for full, size in sizes.items():
            key = full.removeprefix(start)
            # Parameter names may share a prefix, but names of optimizer state have no dots.
            if full.startswith(start) and "." not in key:
                dtype, rows = shards.dtypes[full], divided.get(name, (0, None))[1]
                device = parameter.device if size or on_device.get(id(parameter)) else torch.device("cpu")
                own[key] = _empty(parameter, size, rows, dtype, device)
        optimizer.state.pop(parameter, None)
        if own:
            optimizer.state[parameter] = own


def _empty(
    parameter: Tensor, size: tuple[int, ...], rows: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Returns an empty tensor for the rows that this process holds of an optimizer state of shape `size`."""
    if size == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    if rows is not None and size[:1] == (rows,):
        size = (len(parameter), *size[1:])
    return torch.empty(size, dtype=dtype, device=device)


def restore_parts_(shards: Shards, model: nn.Module, optimizer: Optimizer | None, group: Any = None) -> None:
    """Copies a sharded checkpoint into network and optimizer; all processes must call this.

    Raises ValueError in all processes, before anything is changed, if the checkpoint is of another network.
    """
    from dcnet.training.shard_storage import load_parts

    agree(lambda: _check_network(shards, model), group)
    if optimizer is not None:
        empty_state_(shards, model, optimizer)
    load_parts(shards, parts_of(model, optimizer), group)


def _check_network(shards: Shards, model: nn.Module) -> None:
    own = {MODEL + name for name in model.state_dict()}
    given = {name for name in shards.sizes if name.startswith(MODEL)}
    if own != given:
        missing, unknown = (sorted(names)[:3] for names in (own - given, given - own))
        raise ValueError(
            f"{str(shards.files[0].path)!r} is of another network: it lacks {missing} and has {unknown} instead"
        )
    check_parts(shards, parts_of(model))


def stream_weights(path: Path, model: nn.Module, notes: Mapping[str, Any]) -> None:
    """Writes the weights into one file; all processes must call this, the first one writes.

    They are gathered tensor by tensor, those of sharded heads process by process. If the first process cannot write,
    all raise its error.
    """
    values, owners = model.state_dict(), _owners(model)
    layout = {name: (part.local.dtype, part.size) for name, part in parts_of(model).items()}
    left = [(name, rank) for name in sorted(values) for rank in range(owners[name].world if name in owners else 1)]

    def next_piece() -> Tensor:
        name, rank = left.pop(0)
        return owners[name].rows_of(rank, values[name]) if name in owners else whole(values[name])

    def pieces_of(name: str) -> Iterator[Tensor]:
        while left and MODEL + left[0][0] == name:
            yield next_piece()

    def work() -> None:
        try:
            if rank_of(None)[0] == 0:
                stream_tensors(path, layout, pieces_of, notes)
        finally:
            # The others wait for this process.
            while left:
                next_piece()

    agree(work)


def save_state(
    folder: Path | str,
    step: int,
    networks: Networks,
    optimizer: Optimizer | None = None,
    notes: Mapping[str, Any] | None = None,
    group: Any = None,
) -> Path:
    """Saves the state of a custom training loop; any number of processes can load it again.

    All processes must call this, with the same folder on a disk that they share. Each writes what it holds: its classes
    of a `ShardedMarginSoftmax`, and its shards of an FSDP2 network. The new folder, `step-<step>`, gets its name when
    all files are complete. Older ones are removed, except for the last; one of the same step is replaced. Raises
    ValueError in all processes, and writes nothing, if the folder has a later step, as after a return to an earlier
    one: `load_state` would load the later one next.

    Args:
        folder: the folder of all checkpoints of this training.
        step: the number of steps so far.
        networks: a network, or several by name, such as {"network": network, "head": head}; also under
            DistributedDataParallel.
        optimizer: the optimizer of all of their parameters.
        notes: JSON values by name, which `load_state` returns.
        group: a group of torch.distributed; None for all processes.
    """
    from dcnet.training.shard_storage import save_parts

    step, model = check_whole("step", step, least=0), _joined(networks)
    path = Path(folder) / f"step-{step:08d}"
    agree(lambda: _check_last(path.parent, step) if rank_of(group)[0] == 0 else None, group)
    about = {"notes": dict(notes or {}), "groups": _saved_groups(optimizer)}
    save_parts(path, step, parts_of(model, optimizer), about, group)
    if rank_of(group)[0] == 0:
        older = [number for number in saved_steps(path.parent) if number < step]
        for number in older[: 1 - KEPT]:
            shutil.rmtree(path.with_name(f"step-{number:08d}"), ignore_errors=True)
    return path


def load_state(
    folder: Path | str,
    networks: Networks,
    optimizer: Optimizer | None = None,
    step: int | None = None,
    group: Any = None,
) -> tuple[int, dict[str, Any]]:
    """Loads the state that `save_state` saved with any number of processes; returns its step and notes.

    All processes must call this. Without a checkpoint in the folder it changes nothing, and returns 0 and {}. Raises
    ValueError in all processes, and changes nothing, if shards are missing, damaged or of different saves, or belong
    to another network.

    Args:
        folder: the folder of `save_state`.
        networks: as in `save_state`.
        optimizer: as in `save_state`; its learning rates and other numbers are also restored.
        step: the step to load; None for the last one.
        group: as in `save_state`.
    """
    model, found = _joined(networks), agree(lambda: _known_step(Path(folder), step), group)
    if rank_of(group)[1] > 1:
        # A process whose view of a network disk is older than that of the first one must load the same step.
        chosen = [found]
        dist.broadcast_object_list(chosen, group_src=0, group=group)
        found = chosen[0]
    if found is None:
        return 0, {}
    shards = agree(lambda: Shards.in_folder(Path(folder) / f"step-{found:08d}"), group)
    shards.check_sums(group)
    restore_parts_(shards, model, optimizer, group)
    if optimizer is not None:
        for own, saved in zip(optimizer.param_groups, shards.notes.get("groups") or (), strict=False):
            _restore_group_(own, saved)
    return found, dict(shards.notes.get("notes") or {})


def archive_state(folder: Path | str, file: Path | str) -> Path:
    """Writes the weights of the last checkpoint of `save_state` into one safetensors file; returns its path.

    One process does this, without the networks. It holds one tensor at a time. The names are those of `state_dict()`,
    after the names that `save_state` was given, if any: `head.weight`.
    """
    steps = saved_steps(Path(folder))
    if not steps:
        raise ValueError(f"{str(folder)!r} has no checkpoint of save_state: expected a folder step-<step> in it")
    shards = Shards.in_folder(Path(folder) / f"step-{steps[-1]:08d}")
    shards.check_sums()
    names = {name.removeprefix(MODEL): name for name in shards.sizes if name.startswith(MODEL)}
    layout = {short: (shards.dtypes[name], shards.sizes[name]) for short, name in names.items()}
    stream_tensors(Path(file), layout, lambda short: [shards.read(names[short])], {"step": steps[-1]})
    return Path(file)


def load_archive(file: Path | str, networks: Networks, group: Any = None) -> None:
    """Loads the weights of an archive; each process reads only what it holds. All processes must call this."""
    from dcnet.training.shard_storage import load_parts

    model = _joined(networks)
    shards = agree(lambda: Shards([TensorFile(Path(file))]), group)
    shards.check_sums(group)
    parts = {name.removeprefix(MODEL): part for name, part in parts_of(model).items()}
    load_parts(shards, parts, group)


def saved_steps(folder: Path) -> list[int]:
    """The steps of the sharded checkpoints in a folder, in order."""
    found = [_STEP.fullmatch(path.name) for path in (folder.iterdir() if folder.is_dir() else ())]
    return sorted(int(match[1]) for match in found if match)


def _known_step(folder: Path, step: int | None) -> int | None:
    """The step to load: the last one by default; None if there is no state."""
    steps = saved_steps(folder)
    if step is not None and step not in steps:
        known = ", ".join(map(str, steps)) or "none"
        raise ValueError(f"{str(folder)!r} has no state of step {step}: its steps are {known}")
    return max(steps, default=None) if step is None else step


def _check_last(folder: Path, step: int) -> None:
    """Raises ValueError if the folder has a later step, which would stay the last one."""
    if later := [number for number in saved_steps(folder) if number > step]:
        raise ValueError(
            f"{str(folder)!r} has a state of step {later[-1]}, which is later than step {step}: "
            "save to another folder, or move the later states away"
        )


def _joined(networks: Networks) -> nn.Module:
    """One module of all networks, without their wrappers."""
    if isinstance(networks, nn.Module):
        return _unwrapped(networks)
    return nn.ModuleDict({name: _unwrapped(network) for name, network in networks.items()})


def _unwrapped(network: nn.Module) -> nn.Module:
    """The network inside DistributedDataParallel and torch.compile, which change the names of its parameters."""
    inner = network.module if isinstance(network, DistributedDataParallel) else getattr(network, "_orig_mod", None)
    return _unwrapped(inner) if isinstance(inner, nn.Module) else network


def _saved_groups(optimizer: Optimizer | None) -> list[dict[str, Any]]:
    """The plain values of the parameter groups, such as the learning rate."""
    groups = () if optimizer is None else optimizer.param_groups
    return [
        {key: saved for key, value in group.items() if (saved := _plain(value)) is not Ellipsis} for group in groups
    ]


def _plain(value: Any) -> Any:
    """The value as JSON; `...` if it is not plain, such as a list of parameters."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple) and all(isinstance(inner, PLAIN) for inner in value):
        return list(value)
    return value if isinstance(value, PLAIN) else ...


def _restore_group_(own: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Sets the values of a parameter group in place, since a captured step reads a learning rate that is a tensor."""
    for key, value in saved.items():
        if isinstance(own.get(key), Tensor):
            own[key].fill_(value)
        elif key in own:
            own[key] = tuple(value) if isinstance(value, list) else value
