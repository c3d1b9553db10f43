"""Runs trained in seconds, once per process, an untrained run, and calls of the command line."""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from dcnet.cli.app import main
from dcnet.training import Execution, Run, RunConfig, Trainer, recipe
from dcnet.training.build import build_model
from dcnet.training.record import DataDescription, Record
from dcnet.training.tensor_files import write_tensors

OPERATORS = ("tanh-cos", "conv")
# Removed when the process ends.
_folder = tempfile.TemporaryDirectory(prefix="dcnet-runs-")


@functools.cache
def trained() -> dict[str, Run]:
    """One run per operator."""
    return {operator: _train(operator) for operator in OPERATORS}


def _train(operator: str) -> Run:
    config = recipe("digits", epochs=3, width=0.25, operator=operator)
    run = Run.of(config, Path(_folder.name))
    Trainer(config, run, Execution(device="cpu")).run()
    return run


def root() -> Path:
    """The folder of the trained runs."""
    return trained()["conv"].folder.parent


def call(*arguments: Any) -> int:
    return main([str(argument) for argument in arguments])


def answer(capsys: Any, *arguments: Any) -> Any:
    """The JSON document that a command prints."""
    assert call(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def complaint(capsys: Any, *arguments: Any) -> str:
    """The one-line error of a command with wrong input."""
    assert call(*arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("dcnet: ")
    assert output.err.count("\n") == 1
    return output.err


def color_run(folder: Path, images: Path) -> Run:
    """An untrained network for color images from a folder with the classes dark and light."""
    shades = {"dark": 40, "light": 200}
    for part in ("train", "val"):
        for name, shade in shades.items():
            (images / part / name).mkdir(parents=True)
            for i in range(3):
                noise = np.random.default_rng(i).integers(0, 40, (11, 9, 3))
                Image.fromarray((shade + noise).astype(np.uint8)).save(images / part / name / f"{i}.png")
    config = RunConfig(dataset="imagefolder", model="cnn9-small", operator="conv", width=0.1, image_size=14, epochs=1)
    return untrained_run(folder, config, list(shades), channels=3, size=14)


def untrained_run(folder: Path, config: RunConfig, classes: list[str], channels: int, size: int) -> Run:
    """A finished run with the initial weights of its network."""
    torch.manual_seed(0)
    model, run = build_model(config, len(classes), channels, size), Run(folder)
    write_tensors(run.model_file, {f"model.{name}": value for name, value in model.state_dict().items()}, {})
    data = {"name": config.dataset, "classes": classes, "channels": channels, "image_size": size}
    run.write(Record(config=config.described(), status="done", data=DataDescription.from_json(data)))
    return run
