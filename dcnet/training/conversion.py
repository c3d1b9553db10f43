"""Conversion of a trained network to another operator, as a new run."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from dcnet.environment import commit, environment
from dcnet.layers import Decoupled
from dcnet.operator import Operator, is_plain
from dcnet.training.build import STATISTICS, build_model, load_run_weights_, operator_of_statistics
from dcnet.training.config import RunConfig
from dcnet.training.identity import check_buildable, load_run_data
from dcnet.training.initialization import calibrate_, reset_batch_norm_, training_images
from dcnet.training.record import Record
from dcnet.training.runs import Run, find_run
from dcnet.training.state import MODEL, load_weights_
from dcnet.training.tensor_files import read_tensors, write_tensors

# The status of a run that was converted and not trained.
STATUS = "converted"
# Training images for the calibration, and their batch size.
IMAGES, BATCH = 512, 64


@dataclass(frozen=True)
class Source:
    """The run to convert: its folder, its record, and its weights or one of its checkpoints."""

    run: Run
    weights: Path
    record: Record

    @classmethod
    def find(cls, text: str, root: Path) -> Source:
        """Finds a run by its folder, its name, or a file of weights in its folder."""
        path = Path(text)
        if path.suffix != ".safetensors":
            run = find_run(text, root)
            path = run.model_file
        else:
            run = Run(path.parent.parent if path.parent.name == "checkpoints" else path.parent)
        record = run.record()
        check_buildable(record, run.folder.name)
        if not path.is_file():
            raise ValueError(f"there are no weights at {str(path)!r}: the status of the run is {record.status!r}")
        return cls(run, path, record)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The number of classes, the number of channels, and the image size."""
        data = self.record.data
        return len(data.classes), data.channels, data.image_size

    def config(self) -> RunConfig:
        return self.record.run_config()

    def model(self) -> nn.Module:
        """Builds the network and loads its weights; it is in evaluation mode."""
        model = build_model(self.config(), *self.shape)
        tensors, _ = read_tensors(self.weights)
        load_weights_(model, {name: value for name, value in tensors.items() if name.startswith(MODEL)})
        return model.eval()


@dataclass(frozen=True)
class Converted:
    """A converted network.

    Args:
        source: the run that was converted.
        config: the config of the source with the new operator.
        model: the network, in evaluation mode.
        new: the names of tensors that the source does not have.
        statistics: the operator with which the running statistics of the network were computed.
    """

    source: Source
    config: RunConfig
    model: nn.Module
    new: list[str]
    statistics: str

    def write(self, run: Run) -> None:
        """Writes weights and record; the record has no curves and no results, since the network was not trained."""
        weights = {MODEL + name: value for name, value in self.model.state_dict().items()}
        write_tensors(run.model_file, weights, {"config": self.config.described(), STATISTICS: self.statistics})
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        run.write(_record(self.config, self.source, parameters))

    def free_folder(self, asked: Path | None) -> Run:
        """Returns the run in the given folder, or in a new one next to the source; the folder must be empty."""
        name = f"{STATUS}-{self.config.name}-{self.config.hash}"
        folder = asked or self.source.run.folder.parent / name
        if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
            raise ValueError(f"{str(folder)!r} exists already: give the name of a new folder with --out")
        return Run(folder)


def convert_as_is(source: Source, operator: str) -> Converted:
    """Converts to another operator with the same weights; batch normalization counts as untrained."""
    config = _config_with(source, operator)
    model = build_model(config, *source.shape)
    new = load_run_weights_(model, str(source.weights))
    reset_batch_norm_(model)
    return Converted(source, config, model.eval(), new, operator_of_statistics(str(source.weights)))


def convert_calibrated(source: Source, operator: str, data_dir: Path | None) -> Converted:
    """Converts a plain network to a decoupled one, and calibrates radius and scale of each layer on training images."""
    plain = source.config().operator
    if not is_plain(plain) or is_plain(operator):
        raise ValueError(
            f"--start calibrated converts a plain network to a decoupled one, not from {plain!r} to {operator!r}"
        )
    model, config = source.model(), _config_with(source, operator)
    before = set(model.state_dict())
    images = training_images(load_run_data(source.record, data_dir), source.shape[2], IMAGES, BATCH)
    calibrate_(model, config, source.shape, images)
    # Calibrated layers learn some of the constants, so their spec differs from the given operator.
    spec = next(str(layer.operator) for layer in model.modules() if isinstance(layer, Decoupled))
    new = [name for name in model.state_dict() if name not in before]
    config = dataclasses.replace(config, operator=spec)
    return Converted(source, config, model.eval(), new, config.operator)


def _config_with(source: Source, operator: str) -> RunConfig:
    before = source.config()
    # With `pretrained`, the hash differs from that of a run trained with this operator from the start.
    changes: dict[str, Any] = {"operator": operator, "pretrained": str(source.weights)}
    if not is_plain(operator) and Operator.parse(operator).weighted:
        # These options need an unweighted operator.
        changes |= {"projection_every": 0, "weighted_gradients": "none"}
    config = dataclasses.replace(before, **changes)
    if config.operator == before.operator:
        raise ValueError(f"the run already has the operator {config.operator!r}: give another one")
    return config


def _record(config: RunConfig, source: Source, parameters: int) -> Record:
    before = source.record.to_json()
    return Record(
        name=config.name,
        hash=config.hash,
        status=STATUS,
        command=shlex.join(["dcnet", *sys.argv[1:]]),
        commit=commit(),
        config=config.described(),
        environment=environment(),
        data=source.record.data,
        steps=0,
        steps_done=0,
        parameters=parameters,
        extra={"converted_from": {name: before.get(name) for name in ("name", "hash", "results")}},
        given=frozenset(("commit", "results")),
    )
