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
from dcnet.models.blocks import MarginNetwork, Normalized
from dcnet.operator import PLAIN
from dcnet.optim import param_groups
from dcnet.training.checkpoints import MODEL, read_tensors
from dcnet.training.config import RunConfig

# The buffers of `Normalized`.
PIXELS = ("mean", "std")
# Larger networks may not fit into memory.
USUAL_WIDTH, USUAL_COUNT = 8.0, 10_000
# In the notes of converted weights: the operator with which the running statistics were computed.
STATISTICS = "statistics"


def build_model(config: RunConfig, num_classes: int, channels: int, image_size: int) -> Normalized:
    """The network of a config; its inputs are pixels in [0, 1]."""
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
    """Raises ValueError, before the network is built, if it is much larger than its weights.

    The check takes a second, so it is only for configs of unusual size.
    """
    if config.width <= USUAL_WIDTH and max(*shape, config.features or 0) <= USUAL_COUNT:
        return
    with torch.device("meta"):
        size = sum(value.numel() for value in build_model(config, *shape).state_dict().values())
    found = sum(value.numel() for value in weights.values())
    if size > found:
        raise ValueError(f"the record describes a network of {size:,} values, but its weights have {found:,}")


def _pixels(config: RunConfig, name: str, channels: int) -> tuple[float, ...]:
    """The mean or deviation of pixels per channel."""
    values: tuple[float, ...] = getattr(config, name)
    if config.weights is not None and channels == 1:
        # timm adds up the filters of all colors.
        return (sum(values) / len(values),)
    if len(values) not in (1, channels):
        raise ValueError(
            f"{name} of the recipe {config.recipe!r} has {len(values)} values, and the images of {config.dataset!r} "
            f"have {channels} channels: use another recipe, or one value for all"
        )
    return values


def _with_head(config: RunConfig, network: Network, num_classes: int) -> MarginNetwork:
    """The network with the head of the config in place of the classifier."""
    assert config.margin is not None
    annealing = {None: BY_MARGIN, "none": None}.get(config.annealing, config.annealing)
    count = config.features or network.num_features
    smoothing = config.label_smoothing
    head = MarginSoftmax(count, num_classes, config.margin, config.margin_scale, annealing, smoothing)
    return MarginNetwork(network, head, config.features)


def build_optimizer(config: RunConfig, model: nn.Module, device: torch.device, sharded: bool = False) -> Optimizer:
    """A fused optimizer that skips steps with non-finite gradients.

    SGD has no fused version for sharded weights.
    """
    groups = param_groups(model, config.weight_decay)
    groups = [group for group in groups if group["params"]]
    on_gpu = device.type == "cuda"
    # A tensor, so that a captured step reads the current learning rate.
    rate: Any = torch.tensor(config.lr, device=device) if on_gpu else config.lr
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=config.momentum, fused=not sharded)
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, lr=rate, fused=True, capturable=on_gpu)


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


@torch.no_grad()
def load_run_weights_(model: nn.Module, pretrained: str) -> list[str]:
    """Loads the weights of a run or a file by name and shape; returns the names without weights.

    Parameters that the other network lacks, such as the radius of an operator, keep their initial values. Pixels are
    normalized as in the config of this network.
    """
    weights = _weights(Path(pretrained))
    own = {name: value for name, value in model.state_dict().items() if name not in PIXELS}
    fitting = {name: value for name, value in weights.items() if name in own and own[name].shape == value.shape}
    # The classifier comes last, and may have other classes.
    *filters, _ = [name for name, value in model.named_parameters() if value.dim() > 1]
    if missing := [name for name in filters if name not in fitting]:
        raise ValueError(
            f"{pretrained!r} has nothing that fits the filters {missing[0]!r} of the network, and {len(missing) - 1} "
            "others: give a run of the same structure"
        )
    for name, value in fitting.items():
        own[name].copy_(value)
    return [name for name in own if name not in fitting]


def operator_of_statistics(pretrained: str) -> str:
    """The operator with which the running statistics of the weights were computed; the plain one if unknown."""
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
