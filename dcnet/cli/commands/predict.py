"""`dcnet predict`."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from dcnet.cli.run_options import WRONG_INPUT, OneRun, loaded
from dcnet.escapes import visible

if TYPE_CHECKING:
    from torch import nn

BATCH = 100
# Classes that are named, where there are as many.
SOME = 3
# The exit code where some of the images could not be read.
SOME_BAD = 1
Entry = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Command(OneRun):
    """Classify images with the network of a run.

    Of a folder, all images in it and in the folders below are classified. A file that cannot be read as an image is
    named, the others are classified, and the exit code is 1 (2 if there is no other).

    An image is turned to grey where the run's images are, and resized to their size whatever its shape; what is
    transparent is black. Digits are light on dark, as in the data that they are trained on: --invert turns dark ink on
    light paper into that.
    """

    images: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGE ...", help_behavior_hint="")]
    """Files such as .png or .jpg, or folders of them."""

    top: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint=f"(default: {SOME}, or all)")] = None
    """How many classes to name, the most probable first."""

    invert: bool = False
    """Exchange light and dark."""

    csv: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(optional)")] = None
    """Write a table to this file, one row for each image, in place of printing it."""

    json: bool = False
    """Print one JSON document, and nothing else."""

    def prepare(self) -> Callable[[], int]:
        from dcnet.report.options import writable

        if not self.images:
            raise ValueError("there is nothing to look at without an image: name one or more files or folders")
        model, record = loaded(self.found())
        classes = record["data"]["classes"]
        top = min(SOME, len(classes)) if self.top is None else self.top
        if not 1 <= top <= len(classes):
            raise ValueError(f"--top must be from 1 to {len(classes)}, the number of classes, not {top}")
        files = [file for path in self.images for file in _files(path)]
        out = None if self.csv is None else writable(str(self.csv))
        return lambda: self._show(list(_classified(model, record, files, self.invert, top)), out, top)

    def _show(self, found: list[Entry], out: Path | None, top: int) -> int:
        from dcnet.files import write_atomically
        from dcnet.report.listing import console, print_json

        bad = [entry for entry in found if "error" in entry]
        if len(bad) == len(found):
            more = f"; and none of the {len(bad) - 1} others can" if len(bad) > 1 else ""
            print(f"dcnet: {visible(bad[0]['error'])}{more}", file=sys.stderr)
            return WRONG_INPUT
        for entry in bad:
            print(f"dcnet predict: {visible(entry['error'])}", file=sys.stderr)
        if out is not None:
            write_atomically(out, _as_csv(found, top).encode(errors="surrogateescape"))
        if self.json:
            print_json(found)
        elif out is not None:
            print(f"wrote {out}: {len(found) - len(bad)} of {len(found)} images classified")
        else:
            console().print(_table([entry for entry in found if "error" not in entry]))
        return SOME_BAD if bad else 0


def _files(path: Path) -> list[Path]:
    """The file, or the images of a folder at any depth, in the order of their names; hidden ones are left out."""
    from dcnet.data.imagefolder import SUFFIXES

    if not path.exists():
        raise ValueError(f"{str(path)!r} is neither a file nor a folder: give images such as .png or .jpg")
    if not path.is_dir():
        return [path]
    below = (file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    found = sorted(file for file in below if not any(part.startswith(".") for part in file.relative_to(path).parts))
    if not found:
        raise ValueError(f"the folder {str(path)!r} has no images, at any depth: expected files such as .png or .jpg")
    return found


def _classified(
    model: nn.Module, record: dict[str, Any], files: Sequence[Path], invert: bool, top: int
) -> Iterator[Entry]:
    """What there is to say about each file: its most probable classes, or why it cannot be read."""
    for begin in range(0, len(files), BATCH):
        read = {file: _pixels(file, record, invert) for file in dict.fromkeys(files[begin : begin + BATCH])}
        best = _best(model, read, record["data"]["classes"], top)
        for file in files[begin : begin + BATCH]:
            pixels = read[file]
            yield {"image": str(file), **({"error": pixels} if isinstance(pixels, str) else {"classes": best[file]})}


def _pixels(file: Path, record: dict[str, Any], invert: bool) -> Any:
    """[1, C, H, W], or what is wrong with the file in one sentence."""
    from dcnet.cli.image_options import read_images

    try:
        return read_images([file], record, invert)
    except ValueError as error:
        return str(error)


def _best(model: nn.Module, read: dict[Path, Any], classes: list[str], top: int) -> dict[Path, list[Entry]]:
    """The most probable classes of each image that could be read."""
    import torch

    images = {file: pixels for file, pixels in read.items() if not isinstance(pixels, str)}
    if not images:
        return {}
    with torch.no_grad():
        values, places = model(torch.cat(list(images.values()))).double().softmax(1).topk(top)
    rows = zip(images, places.tolist(), values.tolist(), strict=True)
    return {file: [_named(classes, *pair) for pair in zip(where, what, strict=True)] for file, where, what in rows}


def _named(classes: list[str], place: int, value: float) -> Entry:
    return {"class": classes[place], "index": place, "probability": value}


def _as_csv(found: list[Entry], top: int) -> str:
    """A row for each image: its path, the classes with their probabilities, and what is wrong with it."""
    page = io.StringIO()
    numbers = range(1, top + 1)
    columns = [f"{name}_{number}" for number in numbers for name in ("class", "probability")]
    table = csv.writer(page, lineterminator="\n")
    table.writerow(["image", *columns, "error"])
    for entry in found:
        cells = [cell for best in entry.get("classes", ()) for cell in (best["class"], best["probability"])]
        table.writerow([entry["image"], *(cells or [""] * len(columns)), entry.get("error", "")])
    return page.getvalue()


def _table(found: list[Entry]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table("image", "class")
    table.add_column("probability, %", justify="right")
    for entry in found:
        for i, best in enumerate(entry["classes"]):
            name = "" if i else entry["image"]
            table.add_row(Text(visible(name)), Text(visible(best["class"])), f"{100 * best['probability']:.2f}")
        table.add_section()
    return table
