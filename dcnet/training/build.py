"""Networks and optimizers from a config."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcnet.losses import MarginSoftmax
from dcnet.losses.annealing import BY_MARGIN
from dcnet.models import Network, create_model
from dcnet.models.margin_network import MarginNetwork
from dcnet.models.normalized import Normalized
from dcnet.operator import PLAIN
from dcnet.optim import param_groups
from dcnet.training.checkpoints import read_tensors
from dcnet.training.config import RunConfig
from dcnet.training.state import MODEL

# What `Normalized` has of its own.
PIXELS = ("mean", "std")
# Beyond these a network may be larger than the memory.
USUAL_WIDTH, USUAL_COUNT = 8.0, 10_000
# Noted where weights have another operator by now than their running statistics are of.
STATISTICS = "statistics"


def build_model(config: RunConfig, num_classes: int, channels: int, image_size: int) -> Normalized:
    """The network of a config for images of a dataset, which takes pixels from 0 to 1."""
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
    )
    ended = network if config.margin is None else _with_head(config, network, num_classes)
    return Normalized(ended, mean, std)


def check_size(config: RunConfig, shape: tuple[int, int, int], weights: Mapping[str, Tensor]) -> None:
    """Refuses a config whose network would be much larger than its weights, before it is built.

    To tell costs a second, so that only configs of unusual size are looked at.
    """
    if config.width <= USUAL_WIDTH and max(*shape, config.features or 0) <= USUAL_COUNT:
        return
    with torch.device("meta"):
        size = sum(value.numel() for value in build_model(config, *shape).state_dict().values())
    found = sum(value.numel() for value in weights.values())
    if size > found:
        raise ValueError(f"the record describes a network of {size:,} values, and there are weights of {found:,}")


def _pixels(config: RunConfig, name: str, channels: int) -> tuple[float, ...]:
    """The mean or deviation of pixels; values for other channels would turn grey images into coloured ones."""
    values: tuple[float, ...] = getattr(config, name)
    if config.weights is not None and channels == 1:
        # timm adds up the filters of all colours.
        return (sum(values) / len(values),)
    if len(values) not in (1, channels):
        raise ValueError(
            f"{name} of the recipe {config.recipe!r} has {len(values)} values, and the images of {config.dataset!r} "
            f"have {channels} channels: use another recipe, or one value for all"
        )
    return values


def _with_head(config: RunConfig, network: Network, num_classes: int) -> MarginNetwork:
    """The network with the head of the config in the classifier's place."""
    assert config.margin is not None
    annealing = {None: BY_MARGIN, "none": None}.get(config.annealing, config.annealing)
    count = config.features or network.num_features
    smoothing = config.label_smoothing
    head = MarginSoftmax(count, num_classes, config.margin, config.margin_scale, annealing, smoothing)
    return MarginNetwork(network, head, config.features)


def build_optimizer(config: RunConfig, model: nn.Module, device: torch.device, shared: bool = False) -> Optimizer:
    """The optimizer, of the kind that takes one launch for all tensors and can be told to leave them alone.

    There is none of that kind for SGD where processes hold weights in shares, as `shared` says.
    """
    groups = param_groups(model, config.weight_decay)
    groups = [group for group in groups if group["params"]]
    on_gpu = device.type == "cuda"
    # A tensor, so that a captured step reads the learning rate of the day.
    rate: Any = torch.tensor(config.lr, device=device) if on_gpu else config.lr
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=config.momentum, fused=not shared)
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, lr=rate, fused=True, capturable=on_gpu)


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


@torch.no_grad()
def start_from_(model: nn.Module, pretrained: str) -> list[str]:
    """Takes over the weights of a run, or of a file of tensors, by name and shape; gives the names that had none.

    What operators learn starts anew where the other network has none of it, such as the radius beside plain filters.
    Pixels are normalised as the config of this network says, whatever the other one was given.
    """
    weights = _weights(Path(pretrained))
    own = {name: value for name, value in model.state_dict().items() if name not in PIXELS}
    fitting = {name: value for name, value in weights.items() if name in own and own[name].shape == value.shape}
    # The classifier comes last, and may be one of other classes.
    *filters, _ = [name for name, value in model.named_parameters() if value.dim() > 1]
    if strange := [name for name in filters if name not in fitting]:
        raise ValueError(
            f"{pretrained!r} has nothing that fits the filters {strange[0]!r} of the network, and {len(strange) - 1} "
            "others: give a run of the same structure"
        )
    for name, value in fitting.items():
        own[name].copy_(value)
    return [name for name in own if name not in fitting]


def statistics_behind(pretrained: str) -> str:
    """The operator that the running statistics beside the weights are of; the plain one where they do not tell."""
    _, notes = read_tensors(_file_of(Path(pretrained)))
    if STATISTICS in notes:
        return str(notes[STATISTICS])
    config = notes.get("config")
    return str(config.get("operator", PLAIN)) if isinstance(config, dict) else PLAIN


def _file_of(path: Path) -> Path:
    file = path / "model.safetensors" if path.is_dir() else path
    if not file.exists():
        raise ValueError(f"there are no weights at {str(file)!r}: give a finished run, or a file of weights of one")
    return file


def _weights(path: Path) -> Mapping[str, Tensor]:
    tensors, _ = read_tensors(_file_of(path))
    return {name.removeprefix(MODEL): value for name, value in tensors.items() if not name.startswith("optimizer.")}
