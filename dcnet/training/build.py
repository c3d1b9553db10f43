"""Networks and optimizers from a config."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dcnet.filter_optimizers import OTHER_RATE, Muon, SphereSGD
from dcnet.losses import MarginSoftmax, ShardedMarginSoftmax
from dcnet.losses.annealing import BY_MARGIN
from dcnet.losses.sharded import sharded_heads
from dcnet.models import Network, create_model
from dcnet.models.blocks import MarginNetwork, Normalized, Standardized
from dcnet.operator import PLAIN
from dcnet.optim import param_groups
from dcnet.training.checkpoints import CHECKPOINTS
from dcnet.training.config import OF_FILTERS, RunConfig
from dcnet.training.record import read_record
from dcnet.training.state import MODEL, parts_of
from dcnet.training.tensor_files import read_tensors

# By `standardize`: the arguments of `Standardized`.
STANDARDIZED: dict[str, dict[str, Any]] = {"image": {}, "channel": {"dims": (2, 3)}, "scale": {"center": False}}
# The buffers of `Normalized`.
PIXELS = ("mean", "std")
# Larger networks may not fit into memory; `check_size` checks them before they are built.
USUAL_WIDTH, USUAL_COUNT = 8.0, 10_000
# The key, in the notes of converted weights, of the operator with which the running statistics were computed.
STATISTICS = "statistics"


def build_model(
    config: RunConfig, num_classes: int, channels: int, image_size: int, sharded: bool = False
) -> Normalized:
    """Builds the network of a config; its inputs are pixels in [0, 1]. `sharded` is the result of `shards_head`."""
    mean, std = (_pixels(config, name, channels) for name in ("pixel_mean", "pixel_std"))
    network = create_model(
        config.model,
        operator=config.layer_operator,
        num_classes=num_classes if config.margin is None else 0,
        norm=config.norm,
        activation=config.activation,
        classifier=config.classifier,
        width=config.width,
        in_channels=channels,
        image_size=image_size,
        norm_momentum=config.norm_momentum,
        init_variance=config.init_variance,
    )
    ended = network if config.margin is None else _with_head(config, network, num_classes, sharded)
    if config.standardize == "none":
        return Normalized(ended, mean, std)
    return Standardized(ended, mean, std, **STANDARDIZED[config.standardize])


def check_size(config: RunConfig, shape: tuple[int, int, int], weights: Mapping[str, Tensor]) -> None:
    """Raises ValueError if the network of the config would have more values than the weights.

    The check takes a second, so configs of the usual size skip it.
    """
    if config.width <= USUAL_WIDTH and max(*shape, config.features or 0) <= USUAL_COUNT:
        return
    with torch.device("meta"):
        size = sum(value.numel() for value in build_model(config, *shape).state_dict().values())
    found = sum(value.numel() for value in weights.values())
    if size > found:
        raise ValueError(f"the record describes a network of {size:,} values, but its weights have {found:,}")


def _pixels(config: RunConfig, name: str, channels: int) -> tuple[float, ...]:
    """Returns pixel_mean or pixel_std, with one value for all channels or one per channel."""
    values: tuple[float, ...] = getattr(config, name)
    if config.weights is not None and channels == 1:
        # For gray images, timm sums the filters of the color channels.
        return (sum(values) / len(values),)
    if len(values) not in (1, channels):
        raise ValueError(
            f"{name} of the recipe {config.recipe!r} has {len(values)} values, but the images of {config.dataset!r} "
            f"have {channels} channel{'s' if channels > 1 else ''}: use a recipe for such images"
        )
    return values


def _with_head(config: RunConfig, network: Network, num_classes: int, sharded: bool) -> MarginNetwork:
    """Returns the network with the margin head of the config instead of a classifier."""
    assert config.margin is not None
    annealing = {None: BY_MARGIN, "none": None}.get(config.annealing, config.annealing)
    count = config.features or network.num_features
    own: dict[str, Any] = {"sample": config.sample_classes or 1.0} if sharded else {}
    if not sharded:
        own["label_smoothing"] = config.label_smoothing
    head = (ShardedMarginSoftmax if sharded else MarginSoftmax)(
        count,
        num_classes,
        config.margin,
        config.margin_scale,
        annealing,
        interclass_filtering_threshold=config.interclass_filtering_threshold,
        **own,
    )
    return MarginNetwork(network, head, config.features)


def shards_head(config: RunConfig, asked: bool | None, processes: int, fsdp: bool) -> bool:
    """Whether training uses a sharded head, which divides the classes among the processes and can sample them.

    Raises ValueError if this is impossible. `asked` is the value of `Execution.shard_head`.
    """
    if asked and config.margin is None:
        raise ValueError("shard_head=True needs a head with a margin: give a margin, such as a-softmax")
    sampled = config.sample_classes is not None
    if processes == 1 or not (asked or sampled):
        return sampled
    what = "shard_head=True" if asked else f"sample_classes={config.sample_classes} on {processes} processes"
    if asked is False:
        raise ValueError(f"{what} needs a sharded head, not shard_head=False: omit it")
    for name in ("label_smoothing", "adversary"):
        if value := getattr(config, name):
            raise ValueError(f"{what} does not support {name}={value!r}: omit one of them")
    if fsdp:
        raise ValueError(
            f"{what} does not support FSDP (sharded weights): use DDP{'' if sampled else ', or shard_head=False'}"
        )
    return True


def exclude_from_ddp_(model: nn.Module) -> None:
    """Makes DDP ignore sharded heads: the processes hold different classes, and the gradients are exact already."""
    heads = [(name, (*head.named_parameters(), *head.named_buffers())) for name, head in sharded_heads(model).items()]
    names = [f"{name}.{inner}".removeprefix(".") for name, tensors in heads for inner, _ in tensors]
    if names:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


def count_parameters(model: nn.Module) -> int:
    """The number of values of all parameters, in all processes together."""
    heads = sharded_heads(model).values()
    divided = [(head.get_parameter(name), rows) for head in heads for name, (_, rows) in head.divided.items()]
    others = sum((rows - len(value)) * value[0].numel() for value, rows in divided)
    return others + sum(parameter.numel() for parameter in model.parameters())


def build_optimizer(config: RunConfig, model: nn.Module, device: torch.device, sharded: bool = False) -> Optimizer:
    """Builds a fused optimizer, which can skip steps with non-finite gradients; SGD of sharded weights is not fused."""
    if sharded and config.optimizer in OF_FILTERS:
        raise ValueError(f"optimizer={config.optimizer!r} does not support FSDP (sharded weights): use DDP, or adamw")
    # A tensor, so that a captured step reads the current learning rate.
    rate: Any = torch.tensor(config.lr, device=device) if device.type == "cuda" else config.lr
    return OPTIMIZERS[config.optimizer](config, model, rate, sharded)


def _sgd(config: RunConfig, model: nn.Module, rate: Any, sharded: bool) -> Optimizer:
    return torch.optim.SGD(_groups(config, model), lr=rate, momentum=config.momentum, fused=not sharded)


def _adam(config: RunConfig, model: nn.Module, rate: Any, sharded: bool) -> Optimizer:
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    return kind(_groups(config, model), lr=rate, fused=True, capturable=isinstance(rate, Tensor))


def _muon(config: RunConfig, model: nn.Module, rate: Any, sharded: bool) -> Optimizer:
    return Muon(model, rate, config.momentum, config.weight_decay, config.decay_weighted, config.other_rate or 1.0)


def _sphere_sgd(config: RunConfig, model: nn.Module, rate: Any, sharded: bool) -> Optimizer:
    return SphereSGD(model, rate, config.momentum, config.weight_decay, config.other_rate or OTHER_RATE)


# The optimizers by the names in a config.
OPTIMIZERS: dict[str, Callable[[RunConfig, nn.Module, Any, bool], Optimizer]] = {
    "adam": _adam,
    "adamw": _adam,
    "sgd": _sgd,
    "muon": _muon,
    "sphere-sgd": _sphere_sgd,
}


def _groups(config: RunConfig, model: nn.Module) -> list[dict[str, Any]]:
    groups = param_groups(model, config.weight_decay, weighted=config.decay_weighted)
    return [group for group in groups if group["params"]]


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


@torch.no_grad()
def load_run_weights_(model: nn.Module, pretrained: str) -> list[str]:
    """Copies the weights of a run or a file that match by name and shape; returns the names that were not found.

    Parameters that the source lacks, such as the radius of an operator, keep their initial values. Pixel mean and
    deviation are not copied.
    """
    weights = _weights(Path(pretrained))
    own = {name.removeprefix(MODEL): part for name, part in parts_of(model).items()}
    own = {name: part for name, part in own.items() if name not in PIXELS}
    fitting = {name: value for name, value in weights.items() if name in own and own[name].size == tuple(value.shape)}
    last, matrices = _last_layer(model), [name for name, value in model.named_parameters() if value.dim() > 1]
    if missing := [name for name in matrices if name not in fitting and name != last]:
        raise ValueError(
            f"{pretrained!r} lacks weights of the right shape for {missing[0]!r} and {len(missing) - 1} other "
            "parameters: give a run of the same structure"
        )
    for name, value in fitting.items():
        own[name].copy_(value)
    return [name for name in own if name not in fitting]


def _last_layer(model: nn.Module) -> str:
    """The weight of the margin head or classifier, which may have another number of classes than pretrained weights."""
    for name, module in model.named_modules():
        if isinstance(module, MarginNetwork):
            # Its embedding comes after the head in the order of parameters.
            return f"{name}.head.weight".removeprefix(".")
    return [name for name, value in model.named_parameters() if value.dim() > 1][-1]


def operator_of_statistics(pretrained: str) -> str:
    """Returns the operator with which the running statistics of the weights were computed; plain if unknown."""
    file = _file_of(Path(pretrained))
    _, notes = read_tensors(file)
    if STATISTICS in notes:
        return str(notes[STATISTICS])
    # The first shard of a checkpoint has the notes of the whole checkpoint among its own.
    inner = notes.get("notes")
    config = (inner if isinstance(inner, dict) else notes).get("config") or _recorded_config(file)
    return str(config.get("operator", PLAIN)) if isinstance(config, dict) else PLAIN


def _recorded_config(file: Path) -> dict[str, Any] | None:
    """The config in the record of the run that a checkpoint belongs to, whose notes lack it in older versions."""
    folder = next((place for place in file.absolute().parents[:2] if place.name == CHECKPOINTS), None)
    if folder is None:
        return None
    try:
        return read_record(folder.parent).config
    except ValueError:
        return None


def _file_of(path: Path) -> Path:
    file = path / "model.safetensors" if path.is_dir() else path
    if not file.exists():
        raise ValueError(f"there are no weights at {str(file)!r}: give a finished run, or its model.safetensors")
    return file


def _weights(path: Path) -> Mapping[str, Tensor]:
    tensors, _ = read_tensors(_file_of(path))
    return {name.removeprefix(MODEL): value for name, value in tensors.items() if not name.startswith("optimizer.")}
