"""Which data and which network a run is of, where their names in a config do not tell."""

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from dcnet.data import Dataset, FolderDataset, datasets, load_dataset
from dcnet.data.provenance import fingerprint_of
from dcnet.layers import Decoupled
from dcnet.operator import PLAIN, Operator
from dcnet.training.config import RunConfig

Data = Dataset | FolderDataset
Record = Mapping[str, Any]
# Hexadecimal digits of the fingerprint of a network.
DIGITS = 16
# Classes that are named where there are as many.
SOME = 3


def from_folder(name: str) -> bool:
    """Whether the dataset of that name is whatever is in the user's folder."""
    return name in datasets and datasets[name].from_folder


def with_data(config: RunConfig, dataset: Data) -> RunConfig:
    """The config with the name of the dataset, and the fingerprint of its contents where the name does not tell."""
    if dataset.origin is None:
        return dataclasses.replace(config, dataset=dataset.name, data=fingerprint_of(dataset))
    return dataclasses.replace(config, dataset=dataset.origin.name, data=dataset.origin.fingerprint)


def with_network(config: RunConfig, model: nn.Module, name: str | None = None) -> RunConfig:
    """The config of a custom network: its name, the fingerprint of its structure, and its operator.

    Args:
        config: what else is asked for.
        model: the network.
        name: what to call it; None for its class.
    """
    network, structure = _unwrapped(model), structure_of(model)
    known = config.model if config.network == structure else None
    called = name or known or type(network).__qualname__.rpartition("<locals>.")[2]
    return dataclasses.replace(
        config, model=called, network=structure, operator=_operator_of(network) or config.operator
    )


def structure_of(model: nn.Module) -> str:
    """Digits that depend on the classes and operators of all layers, and on the shapes of what they learn."""
    network = _unwrapped(model)
    lines = [f"{name} {type(layer).__qualname__} {_spec(layer)}" for name, layer in network.named_modules()]
    lines += [f"{name} {value.dtype} {tuple(value.shape)}" for name, value in network.state_dict().items()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:DIGITS]


def class_of(model: nn.Module) -> str:
    """The class of a network, with its module."""
    kind = type(_unwrapped(model))
    return f"{kind.__module__}.{kind.__qualname__}"


def _unwrapped(model: nn.Module) -> nn.Module:
    """The network itself, where torch.compile has wrapped it."""
    network: nn.Module = getattr(model, "_orig_mod", model)
    return network


def _spec(layer: nn.Module) -> str:
    return str(layer.operator) if isinstance(layer, Decoupled) else ""


def _operator_of(model: nn.Module) -> str | None:
    """The one operator of all decoupled layers, if a config can name it."""
    specs = {_spec(layer) for layer in model.modules()} - {""}
    if not specs:
        return PLAIN
    try:
        return str(Operator.parse(specs.pop())) if len(specs) == 1 else None
    except (TypeError, ValueError):
        return None


def is_of(record: Record, config: RunConfig) -> bool:
    """Whether a record is of the data and the network of a config; records of old say nothing about them."""
    known = record["config"]
    return all(known.get(name) == getattr(config, name) for name in ("data", "network") if name in known)


def check_is_of(record: Record, config: RunConfig, folder: Path) -> None:
    """Raises ValueError if a folder holds a run of other data or another network than those of the config."""
    if not is_of(record, config):
        raise ValueError(
            f"{str(folder)!r} holds another run, {record.get('name')}, which has custom data or a custom network: "
            "move it elsewhere, or choose another folder with --runs, or with Run.of(config, model=..., dataset=...)"
        )


def check_has_builder(record: Record, name: str) -> None:
    """Raises ValueError for a run of a custom network, which no config can build."""
    if record["config"].get("network") is not None:
        raise ValueError(
            f"the run {name!r} is of a custom network, {record.get('network_class') or record['config']['model']}, "
            "which only you can build: use load_model(run, builder) or Trainer(config, run, model=...) in Python"
        )


def load_data(config: RunConfig, data_dir: Path | None) -> Data:
    """The dataset of a config; a ValueError if there is another one in the folder."""
    _check_by_name(config.dataset, config.data)
    dataset = load_dataset(config.dataset, data_dir)
    fingerprint = dataset.origin.fingerprint if dataset.origin else None
    if config.data not in (None, fingerprint):
        folder = dataset.origin.folder if dataset.origin else data_dir
        raise ValueError(f"{str(folder)!r} has other images than the config: give their folder with --data-dir")
    return dataset


def _check_by_name(name: str, data: str | None) -> None:
    if data is not None and not from_folder(name):
        raise ValueError(
            f"the run is of a custom dataset, {name!r}, which only you can load: use Trainer(config, run, dataset=...) "
            "in Python"
        )


def data_of(record: Record, data_dir: Path | None = None) -> Data:
    """The dataset that a run was trained on, from the folder in its record, or from another that has the same files."""
    name, known = record["config"]["dataset"], record.get("data", {})
    _check_by_name(name, record["config"].get("data"))
    folder = data_dir or _recorded_folder(known)
    dataset = load_dataset(name, folder)
    check_same_data(known, described_data(dataset), folder)
    skipped = known.get("skipped", [])
    return dataset.without(skipped) if isinstance(dataset, FolderDataset) else dataset


def _recorded_folder(known: Record) -> Path | None:
    folder = known.get("folder")
    if folder is not None and not Path(folder).is_dir():
        raise ValueError(f"the images of the run were in {folder!r}, which is no folder now: give it with --data-dir")
    return None if folder is None else Path(folder)


def described_data(dataset: Data) -> dict[str, Any]:
    """What a record says of a dataset; of one of the user's also where it is, and its fingerprint."""
    found: dict[str, Any] = {
        "name": dataset.name,
        "classes": list(dataset.classes),
        "channels": dataset.channels,
        "train_images": len(dataset.train),
        "test_images": len(dataset.test if isinstance(dataset, Dataset) else dataset.val),
    }
    origin = dataset.origin
    found["fingerprint"] = fingerprint_of(dataset) if origin is None else origin.fingerprint
    folder = origin.folder if origin else None
    if isinstance(dataset, FolderDataset):
        found |= {"image_files": True, "held_out": dataset.held_out, "skipped": list(dataset.skipped)}
        folder = folder or dataset.folder
    found["folder"] = None if folder is None else str(folder)
    return {name: value for name, value in found.items() if value not in (None, [])}


def same_data(known: Record, found: Record) -> bool:
    """Whether two descriptions are of the same contents, as far as both tell."""
    if known.get("fingerprint") and found.get("fingerprint"):
        return bool(known["fingerprint"] == found["fingerprint"])
    names = [name for name in ("classes", "train_images", "test_images") if name in known]
    return all(known[name] == found[name] for name in names)


def check_same_data(known: Record, found: Record, folder: Path | None) -> None:
    """Raises ValueError if a folder has other files than a run was trained on, which the record of the run tells."""
    if not known.get("fingerprint") or same_data(known, found):
        return
    then, now = in_words(known), in_words(found)
    told = f"{then} then, {now} now" if then != now else f"{then}, but with other names or sizes"
    raise ValueError(
        f"{str(folder or found.get('folder'))!r} has other images than the run was trained on ({told}): "
        "give their folder with --data-dir"
    )


def in_words(data: Record) -> str:
    """How many images of which classes."""
    classes = data["classes"]
    some = ", ".join(classes[:SOME]) + (", ..." if len(classes) > SOME else "")
    return f"{data['train_images']} + {data['test_images']} of {len(classes)} classes, {some}"
