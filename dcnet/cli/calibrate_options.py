"""A plain network made a decoupled one whose channels are as large as they were."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from dcnet.cli.convert_options import Source, with_operator

if TYPE_CHECKING:
    from torch import nn

    from dcnet.training import RunConfig

IMAGES, BATCH = 512, 64


def calibrated(source: Source, operator: str, data_dir: Path | None) -> tuple[RunConfig, nn.Module, list[str]]:
    """As `with_operator`, but radius and scale of each layer are set by images that the run was trained on."""
    from dcnet.convert import decouple
    from dcnet.layers import Decoupled
    from dcnet.operator import is_plain
    from dcnet.training.identity import data_of
    from dcnet.training.pretrained import training_images

    if not is_plain(source.config().operator) or is_plain(operator):
        pair = f"{source.config().operator!r} to {operator!r}"
        raise ValueError(f"--start calibrated goes from a plain network to a decoupled one, not from {pair}")
    before = source.model()
    config, twin, _ = with_operator(source, operator)
    chosen = {name for name, layer in twin.named_modules() if isinstance(layer, Decoupled)}
    dataset = data_of(source.record, data_dir)
    images = training_images(dataset, source.shape[2], IMAGES, BATCH)
    model = decouple(
        before, operator, where=lambda name, _: name in chosen, linear=True, start="calibrated", data=images
    )
    # Every layer has learned constants now where the spec had numbers.
    spec = next(str(layer.operator) for layer in model.modules() if isinstance(layer, Decoupled))
    new = [name for name in model.state_dict() if name not in before.state_dict()]
    return dataclasses.replace(config, operator=spec), model.eval(), new
