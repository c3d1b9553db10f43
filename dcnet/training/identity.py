"""Identity of datasets and custom networks: fingerprints, descriptions, and checks that a run matches them."""

import dataclasses
import hashlib
import inspect
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from dcnet.data import Dataset, FolderDataset, datasets, load_dataset
from dcnet.layers import Decoupled
from dcnet.operator import PLAIN, Operator
from dcnet.training.config import RunConfig
from dcnet.training.record import DataDescription, Record

Data = Dataset | FolderDataset
# Hexadecimal digits of the fingerprint of a network structure.
DIGITS = 16
# The largest number of class names in a message.
SOME = 3


def from_folder(name: str) -> bool:
    """Whether the dataset of this name is read from a folder that the user gives."""
    return name in datasets and datasets[name].from_folder


def with_data(config: RunConfig, dataset: Data) -> RunConfig:
    """Returns the config with the name of the dataset, and its fingerprint if the name does not identify the data."""
    if dataset.origin is None:
        return dataclasses.replace(config, dataset=dataset.name, data=dataset.fingerprint())
    return dataclasses.replace(config, dataset=dataset.origin.name, data=dataset.origin.fingerprint)


def with_network(config: RunConfig, model: nn.Module, name: str | None = None) -> RunConfig:
    """Returns the config with the name, the structure fingerprint and the operator of a custom network.

    Args:
        config: the config to change.
        model: the network.
        name: the name of the network; None for the name of its class.
    """
    network, structure = _unwrapped(model), structure_of(model)
    known = config.model if config.network == structure else None
    called = name or known or type(network).__qualname__.rpartition("<locals>.")[2]
    return dataclasses.replace(
        config, model=called, network=structure, operator=_operator_of(network) or config.operator
    )


def identify(
    config: RunConfig, model: nn.Module | None = None, dataset: Data | None = None, model_name: str | None = None
) -> RunConfig:
    """Returns the config with the names and fingerprints of a custom network and dataset."""
    of_data = config if dataset is None else with_data(config, dataset)
    return of_data if model is None else with_network(of_data, model, model_name)


def structure_of(model: nn.Module) -> str:
    """Returns a fingerprint of the classes and operators of all layers, and of the shapes in the state dict."""
    network = _unwrapped(model)
    lines = [f"{name} {type(layer).__qualname__} {_spec(layer)}" for name, layer in network.named_modules()]
    lines += [f"{name} {value.dtype} {tuple(value.shape)}" for name, value in network.state_dict().items()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:DIGITS]


def class_of(model: nn.Module) -> str:
    """Returns the full name of the class of a network, with its Python module."""
    kind = type(_unwrapped(model))
    return f"{kind.__module__}.{kind.__qualname__}"


def _unwrapped(model: nn.Module) -> nn.Module:
    """Returns the network without the wrapper of torch.compile."""
    network: nn.Module = getattr(model, "_orig_mod", model)
    return network


def _spec(layer: nn.Module) -> str:
    return str(layer.operator) if isinstance(layer, Decoupled) else ""


def _operator_of(model: nn.Module) -> str | None:
    """Returns the operator that all decoupled layers share; None if they differ or a config cannot name it."""
    specs = {_spec(layer) for layer in model.modules()} - {""}
    if not specs:
        return PLAIN
    try:
        return str(Operator.parse(specs.pop())) if len(specs) == 1 else None
    except (TypeError, ValueError):
        return None


def is_same_run(record: Record, config: RunConfig) -> bool:
    """Whether the fingerprints of data and network match the config; old records without them always match."""
    known = record.config
    return all(known.get(name) == getattr(config, name) for name in ("data", "network") if name in known)


def check_same_run(record: Record, config: RunConfig, folder: Path) -> None:
    """Raises ValueError if the run in a folder has other data or another network than the config."""
    if not is_same_run(record, config):
        raise ValueError(
            f"{str(folder)!r} holds another run, {record.name}, which has custom data or a custom network: "
            "move it elsewhere, or choose another folder with --runs, or with Run.of(config, model=..., dataset=...)"
        )


def check_buildable(record: Record, name: str) -> None:
    """Raises ValueError if the run has a custom network, which cannot be built from the config."""
    if record.config.get("network") is not None:
        raise ValueError(
            f"the run {name!r} has a custom network, {record.network_class or record.config['model']}, "
            "which only your code can build: use load_model(run, builder) or Trainer(config, run, model=...) in Python"
        )


def load_data(config: RunConfig, data_dir: Path | None) -> Data:
    """Loads the dataset of a config; raises ValueError if the folder has other data."""
    _check_by_name(config.dataset, config.data)
    dataset = load_dataset(config.dataset, data_dir)
    fingerprint = dataset.origin.fingerprint if dataset.origin else None
    if config.data not in (None, fingerprint):
        folder = dataset.origin.folder if dataset.origin else data_dir
        raise ValueError(f"{str(folder)!r} has other images than the config: give the right folder with --data-dir")
    return dataset


def _check_by_name(name: str, data: str | None) -> None:
    if data is not None and not from_folder(name):
        raise ValueError(
            f"the run has a custom dataset, {name!r}, which only your code can load: "
            "use Trainer(config, run, dataset=...) in Python"
        )


def load_run_data(record: Record, data_dir: Path | None = None) -> Data:
    """Loads the dataset of a run from the folder in its record, or from another folder with the same files."""
    name, known = record.config["dataset"], record.data
    _check_by_name(name, record.config.get("data"))
    folder = data_dir or _recorded_folder(known)
    dataset = load_dataset(name, folder)
    check_same_data(known, describe_data(dataset), folder)
    return dataset.without(known.skipped) if isinstance(dataset, FolderDataset) else dataset


def _recorded_folder(known: DataDescription) -> Path | None:
    folder = known.folder
    if folder is not None and not Path(folder).is_dir():
        raise ValueError(f"the folder of the images of the run, {folder!r}, does not exist: give it with --data-dir")
    return None if folder is None else Path(folder)


def describe_data(dataset: Data) -> DataDescription:
    """Returns the description of a dataset for a record, with folder and fingerprint if the data come from the user."""
    origin = dataset.origin
    folder = origin.folder if origin else None
    found = DataDescription(
        name=dataset.name,
        classes=list(dataset.classes),
        channels=dataset.channels,
        train_images=len(dataset.train),
        test_images=len(dataset.test if isinstance(dataset, Dataset) else dataset.val),
        fingerprint=dataset.fingerprint() if origin is None else origin.fingerprint,
    )
    if isinstance(dataset, FolderDataset):
        found.image_files, found.held_out, found.skipped = True, dataset.held_out, list(dataset.skipped)
        folder = folder or dataset.folder
    found.folder = None if folder is None else str(folder)
    return found


def same_data(known: DataDescription, found: DataDescription) -> bool:
    """Whether two descriptions match, as far as both have values."""
    if known.fingerprint and found.fingerprint:
        return known.fingerprint == found.fingerprint
    names = [name for name in ("classes", "train_images", "test_images") if getattr(known, name)]
    return all(getattr(known, name) == getattr(found, name) for name in names)


def check_same_data(known: DataDescription, found: DataDescription, folder: Path | None) -> None:
    """Raises ValueError if a folder has other files than the run was trained on."""
    if not known.fingerprint or same_data(known, found):
        return
    then, now = _summary(known), _summary(found)
    change = f"{then} then, {now} now" if then != now else f"{then}, but with other names or sizes"
    raise ValueError(
        f"{str(folder or found.folder)!r} has other images than the run was trained on ({change}): "
        "give their folder with --data-dir"
    )


def _summary(data: DataDescription) -> str:
    """Returns the numbers of images and classes, for a message."""
    classes = data.classes
    return f"{data.train_images} + {data.test_images} of {len(classes)} classes, {some_names(classes)}"


def some_names(names: Sequence[str]) -> str:
    """Returns the first names of a list, for a message."""
    return ", ".join(names[:SOME]) + (", ..." if len(names) > SOME else "")


def check_classes(dataset: Data, record: Record) -> None:
    """Raises ValueError if the dataset has other classes than the run was trained on."""
    known, found = record.data.classes, list(dataset.classes)
    if known != found:
        raise ValueError(
            f"{dataset.name} has {len(found)} classes ({some_names(found)}), but the run was trained on "
            f"{len(known)} ({some_names(known)}): give the folder of its images with --data-dir"
        )


def check_network(model: nn.Module | None, config: RunConfig, shard_head: bool | None = None) -> None:
    """Raises TypeError or ValueError if a custom network cannot be trained with the config."""
    if model is None:
        return
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {model!r}")
    for name, value in (("shard_head", shard_head), ("sample_classes", config.sample_classes)):
        if value:
            raise ValueError(f"{name}={value} does not apply to a custom network, which has its own head: omit it")
    if config.margin is not None:
        try:
            inspect.signature(model.forward).bind("images", "labels")
        except TypeError:
            raise ValueError(
                f"margin={config.margin!r} needs a network whose forward takes images and labels and returns loss and "
                f"logits, which {type(model).__name__} does not: omit margin, or train a MarginNetwork"
            ) from None
