"""`dcnet predict`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from dcnet.cli.run_options import OneRun, loaded

if TYPE_CHECKING:
    from torch import Tensor, nn

BATCH = 100
# Classes that are named, where there are as many.
SOME = 3


@dataclass(frozen=True, kw_only=True)
class Command(OneRun):
    """Say what is on images, by the network of a run.

    An image is turned to grey where the run's images are, and resized to their size whatever its shape; what is
    transparent is black. Digits are light on dark, as in the data that they are trained on: --invert turns dark ink on
    light paper into that.
    """

    images: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGE ...", help_behavior_hint="")]
    """Files such as .png or .jpg."""

    top: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint=f"(default: {SOME}, or all)")] = None
    """How many classes to name, the most probable first."""

    invert: bool = False
    """Exchange light and dark."""

    json: bool = False
    """Print one JSON document, and nothing else."""

    def prepare(self) -> Callable[[], int]:
        from dcnet.cli.image_options import read_images

        if not self.images:
            raise ValueError("there is nothing to look at without an image: name one or more files")
        model, record = loaded(self.found())
        classes = record["data"]["classes"]
        top = min(SOME, len(classes)) if self.top is None else self.top
        if not 1 <= top <= len(classes):
            raise ValueError(f"--top must be from 1 to {len(classes)}, the number of classes, not {top}")
        pixels = read_images(self.images, record, self.invert)
        return lambda: self._show(_probabilities(model, pixels), classes, top)

    def _show(self, probabilities: Tensor, classes: list[str], top: int) -> int:
        from dcnet.report.listing import console, print_json

        found = [
            {"image": str(path), "classes": _best(row, classes, top)}
            for path, row in zip(self.images, probabilities, strict=True)
        ]
        if self.json:
            print_json(found)
        else:
            console().print(_table(found))
        return 0


def _best(row: Tensor, classes: list[str], top: int) -> list[dict[str, Any]]:
    values, places = row.topk(top)
    pairs = zip(places.tolist(), values.tolist(), strict=True)
    return [{"class": classes[place], "index": place, "probability": value} for place, value in pairs]


def _probabilities(model: nn.Module, pixels: Tensor) -> Tensor:
    import torch

    with torch.no_grad():
        return torch.cat([model(batch).double().softmax(1) for batch in pixels.split(BATCH)])


def _table(found: list[dict[str, Any]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table("image", "class")
    table.add_column("probability, %", justify="right")
    for entry in found:
        for i, best in enumerate(entry["classes"]):
            name = "" if i else entry["image"]
            table.add_row(Text(name), Text(best["class"]), f"{100 * best['probability']:.2f}")
        table.add_section()
    return table
