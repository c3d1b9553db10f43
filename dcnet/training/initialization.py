"""Initialization: pretrained weights of timm, calibration, and running statistics."""

import dataclasses
import pickle
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dcnet.convert import decouple
from dcnet.data import Dataset, FolderDataset
from dcnet.files import fingerprint
from dcnet.layers import Decoupled
from dcnet.models import Network
from dcnet.models.blocks import MarginNetwork, Normalized, Whitening
from dcnet.models.timm_models import own_file, with_weights
from dcnet.modes import kept_buffers
from dcnet.network_norms import tracked_layers
from dcnet.operator import PLAIN
from dcnet.training.build import build_model
from dcnet.training.config import OWN_WEIGHTS, RunConfig
from dcnet.training.record import Record

# Training images for the calibration, and their batch size.
IMAGES, BATCH = 128, 32
# Keys under which the training scripts of timm store the state dict.
INSIDE = ("state_dict_ema", "model_ema", "state_dict", "model")


@dataclass(frozen=True)
class Loaded:
    """Describes which pretrained weights a network was loaded from.

    Attributes:
        file: name of the file, or of the timm model.
        sha256: checksum of the file, if there is one.
        tensors: number of tensors that were copied.
        classes: number of classes of the classifier in the file; 0 if it has none.
        new: descriptions of parts that were not in the file.
        calibrated: number of layers that were decoupled and calibrated.
    """

    file: str
    sha256: str | None
    tensors: int
    classes: int
    new: tuple[str, ...]
    calibrated: int

    def described(self) -> dict[str, Any]:
        """Returns JSON values for the record."""
        return dataclasses.asdict(self) | {"new": list(self.new)}

    def __str__(self) -> str:
        sums = "" if self.sha256 is None else f" (sha256 {self.sha256[:12]})"
        kept = f"including the classifier of {self.classes} classes"
        new = f"new: {', '.join(self.new)}" if self.new else kept
        layers = "1 layer is" if self.calibrated == 1 else f"{self.calibrated} layers are"
        calibrated = f"; {layers} decoupled and calibrated" if self.calibrated else ""
        return f"{self.tensors} tensors from {self.file}{sums}; {new}{calibrated}"


def build_pretrained(
    config: RunConfig, dataset: Dataset | FolderDataset, image_size: int, device: torch.device, sharded: bool = False
) -> tuple[nn.Module, Loaded]:
    """Builds the network of a config with pretrained weights; a decoupled one is calibrated on training images.

    `sharded` is that of `build_model`.
    """
    shape = (len(dataset.classes), dataset.channels, image_size)
    model = build_model(dataclasses.replace(config, operator=PLAIN), *shape, sharded)
    loaded = _load_(model, config, *shape[1:])
    if not config.decoupled:
        return model, loaded
    calibrate_(model.to(device), config, shape, training_images(dataset, image_size, IMAGES, BATCH))
    layers = [layer for layer in model.modules() if isinstance(layer, Decoupled)]
    return model, dataclasses.replace(loaded, calibrated=len(layers))


def calibrate_(model: nn.Module, config: RunConfig, shape: tuple[int, int, int], images: list[Tensor]) -> None:
    """Decouples the layers of a plain network that the config decouples, and calibrates them on the images."""
    twin = build_model(config, *shape)
    chosen = {name for name, layer in twin.named_modules() if isinstance(layer, Decoupled)}
    decouple(
        model,
        config.operator,
        where=lambda name, _: name in chosen,
        linear=True,
        start="calibrated",
        data=images,
        inplace=True,
    )


def training_images(dataset: Dataset | FolderDataset, image_size: int, count: int, batch: int) -> list[Tensor]:
    """Returns batches of pixels in [0, 1] for a calibration; always the same images."""
    batch, count = min(batch, len(dataset.train)), min(count, len(dataset.train))
    if isinstance(dataset, FolderDataset):
        loader = dataset.train_loader(batch, image_size, workers=0, steps=max(1, count // batch))
        return [images for images, _ in loader]
    some = dataset.train.subset(count, dataset.num_classes)
    return [images.float() / 255 for images in some.images.split(batch)]


def check_weights(record: Record, config: RunConfig) -> None:
    """Raises ValueError if the weights file has changed since a finished run; the file may be missing."""
    known = (record.weights or {}).get("sha256")
    if known is None or config.weights in (None, OWN_WEIGHTS) or not Path(str(config.weights)).is_file():
        return
    found = fingerprint(Path(str(config.weights)))
    if found != known:
        raise ValueError(
            f"{config.name}-{config.hash} is done, but {config.weights!r} has changed: its sha256 was {known[:12]}..., "
            f"and is {found[:12]}... now; train again with --again, or keep both with another folder for --runs"
        )


@torch.no_grad()
def _load_(model: Normalized, config: RunConfig, channels: int, image_size: int) -> Loaded:
    """Copies pretrained weights into the plain network, with the classifier if the number of classes is the same."""
    name, weights = config.model.partition(":")[2], str(config.weights)
    tensors = None if weights == OWN_WEIGHTS else read_weights(Path(weights))
    source, classifier = with_weights(name, tensors, channels, image_size)
    path = own_file(name) if weights == OWN_WEIGHTS else Path(weights)
    network = model.network
    body = network.body if isinstance(network, MarginNetwork) else network
    assert isinstance(body, Network)
    values = source.state_dict()
    own = body.body.state_dict()
    for key, value in own.items():
        value.copy_(values[key])
    same = _copy_classifier_(network, classifier)
    return Loaded(
        file=config.model if path is None else path.name,
        sha256=None if path is None else fingerprint(path),
        tensors=len(own) + (2 if same else 0),
        classes=0 if classifier is None else len(classifier.weight),
        new=() if same else (_describe_new(network, classifier),),
        calibrated=0,
    )


def _copy_classifier_(network: nn.Module, classifier: nn.Linear | None) -> bool:
    """Copies the classifier if it is linear and has the same shape; returns whether it did."""
    own = network.classifier if isinstance(network, Network) else None
    if classifier is None or type(own) is not nn.Linear or own.weight.shape != classifier.weight.shape:
        return False
    own.weight.copy_(classifier.weight)
    if own.bias is not None:
        own.bias.copy_(torch.zeros_like(own.bias) if classifier.bias is None else classifier.bias)
    return True


def _describe_new(network: nn.Module, classifier: nn.Linear | None) -> str:
    what = "the head with a margin" if isinstance(network, MarginNetwork) else "the classifier"
    return what if classifier is None else f"{what} (the file has one of {len(classifier.weight)} classes)"


def read_weights(path: Path) -> dict[str, Tensor]:
    """Reads a state dict of timm from .safetensors or a torch.save file; unpickles only tensors."""
    if not path.is_file():
        raise ValueError(f"there are no weights at {str(path)!r}: give a .safetensors file, or 'timm' for timm's own")
    found = _read_safetensors(path) if path.suffix == ".safetensors" else _read_zip(path)
    tensors = {_without_wrappers(name): value for name, value in found.items() if isinstance(value, Tensor)}
    if not tensors:
        raise ValueError(f"{str(path)!r} has no tensors by name: give the state dict of a timm network")
    return tensors


def _read_safetensors(path: Path) -> dict[str, Any]:
    try:
        with safe_open(path, framework="pt") as file:
            if "dcnet" in (file.metadata() or {}):
                raise ValueError(f"{str(path)!r} has weights of a dcnet run, not of timm: give it to --pretrained")
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    except SafetensorError as error:
        raise ValueError(f"{str(path)!r} is not a whole file of tensors: {error}") from None


def _read_zip(path: Path) -> dict[str, Any]:
    """Reads a torch.save file with `weights_only`, which loads only tensors and plain containers."""
    hint = "if you trust it, load it and write its state dict with safetensors.torch.save_file"
    try:
        with zipfile.ZipFile(path) as archive:
            # torch.save does not compress; a compressed file could be huge in memory.
            packed = any(entry.compress_size < entry.file_size for entry in archive.infolist())
    except (OSError, zipfile.BadZipFile):
        packed = True
    if packed:
        raise ValueError(f"{str(path)!r} is neither .safetensors nor a file of a current torch.save: {hint}")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError, KeyError, RuntimeError, TypeError, ValueError):
        raise ValueError(f"{str(path)!r} has objects other than tensors, which are not loaded: {hint}") from None
    for name in INSIDE:
        if isinstance(found, dict) and isinstance(found.get(name), dict):
            return dict(found[name])
    return dict(found) if isinstance(found, dict) else {}


def _without_wrappers(name: str) -> str:
    """Removes the prefixes of DistributedDataParallel and torch.compile from a name."""
    return str(name).removeprefix("module.").removeprefix("_orig_mod.")


# Training images from which fixed whitening filters are computed.
WHITENING_IMAGES = 2_000


def init_whitening_(model: Normalized, dataset: Dataset | FolderDataset, image_size: int) -> None:
    """Computes the filters of fixed whitening layers from training images; most networks have no such layer."""
    layers = [layer for layer in model.modules() if isinstance(layer, Whitening)]
    if layers:
        images = torch.cat(training_images(dataset, image_size, WHITENING_IMAGES, BATCH))
        for layer in layers:
            layer.fit_(model.normalize(images))


KEPT = ("running_mean", "running_var")


@torch.no_grad()
def init_batch_norm_(model: nn.Module, forward: Callable[[], object]) -> None:
    """Sets the running statistics of every untrained batch normalization to those of one batch.

    The variance of a decoupled layer's output may be 0.01, but the initial running variance is 1. Without this,
    accuracy after short training would be at chance. All other buffers keep their values.

    Args:
        model: the network, in training mode.
        forward: runs one batch through the network.
    """
    layers = [layer for layer in _batch_norms(model) if layer.momentum is not None and not layer.num_batches_tracked]
    if not layers:
        return
    with kept_buffers(model), _newest_batch_only(layers):
        forward()
        running = [getattr(layer, name) for layer in layers for name in KEPT]
        found = [(value, value.clone()) for value in running if value.isfinite().all()]
    for value, new in found:
        value.copy_(new)


@contextmanager
def _newest_batch_only(layers: list[_BatchNorm]) -> Iterator[None]:
    """Makes batch normalization replace its running statistics by those of the newest batch."""
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.momentum = 1.0
    try:
        yield
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum


@contextmanager
def refreshed_statistics(model: nn.Module, forward: Callable[[int], object], batches: int) -> Iterator[None]:
    """Replaces running statistics, inside the context, by their means over batches; then restores all buffers.

    Running statistics lag behind training: with a momentum of 0.001, by thousands of steps. This concerns batch
    normalization and running mean norms.

    Args:
        model: the network, in training mode.
        forward: runs a batch through the network, given its number.
        batches: number of batches.
    """
    with kept_buffers(model):
        _refresh_(model, forward, batches)
        yield


@torch.no_grad()
def _refresh_(model: nn.Module, forward: Callable[[int], object], batches: int) -> None:
    layers = _batch_norms(model)
    running = [getattr(layer, name) for layer in layers for name in KEPT] + _mean_norms(model)
    if not running:
        return
    sums = [torch.zeros_like(value) for value in running]
    with _newest_batch_only(layers):
        for batch in range(batches):
            reset_mean_norms_(model)
            forward(batch)
            torch._foreach_add_(sums, running)
    for value, total in zip(running, sums, strict=True):
        value.copy_(total / batches)


def reset_batch_norm_(model: nn.Module) -> None:
    """Marks every batch normalization as untrained, after the operator has changed.

    The running statistics stay, so that the network can be evaluated without training.
    """
    for layer in _batch_norms(model):
        if layer.num_batches_tracked is not None:
            layer.num_batches_tracked.zero_()


@torch.no_grad()
def reset_mean_norms_(model: nn.Module) -> None:
    """Makes every running mean norm start again with the next training batch, after the operator has changed."""
    for mean in _mean_norms(model):
        mean.zero_()


def _mean_norms(model: nn.Module) -> list[Tensor]:
    return [layer.get_buffer("mean_norm") for layer in tracked_layers(model)]


def _batch_norms(model: nn.Module) -> list[_BatchNorm]:
    return [layer for layer in model.modules() if isinstance(layer, _BatchNorm) and layer.track_running_stats]
