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

from dcnet import data, training
from dcnet.cli.options import JsonOption, OneRun, OptionalFile, arg, load_run, writable
from dcnet.exit_codes import BAD_INPUT, FAILED
from dcnet.files import write_atomically
from dcnet.table import Table
from dcnet.terminal import console, print_json, visible

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dcnet.training.image_input import ImageInput

BATCH = 100
# The number of classes that are printed by default.
TOP = 3
Entry = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Command(JsonOption, OneRun):
    """Classify images with a trained network.

    For a folder, all images in it and in its subfolders are classified. If some files cannot be read as images, they
    are reported, the others are classified, and the exit code is 1 (2 if none can be read).

    An image is converted to gray if the network takes gray images, and resized to the size of its input; transparent
    pixels become black. Digits in the training data are light on dark: use --invert for dark ink on light paper.
    """

    images: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGE ...", help_behavior_hint="")]
    """Files such as .png or .jpg, or folders of them."""

    top: Annotated[int | None, arg("N", f"{TOP}, or all")] = None
    """The number of classes to print, the most probable first."""

    invert: bool = False
    """Swap light and dark."""

    csv: OptionalFile = None
    """Write a table with one row per image to this file instead of printing it."""

    def prepare(self) -> Callable[[], int]:
        if not self.images:
            raise ValueError("give one or more images: files, or folders of them")
        model, record = load_run(self.found())
        classes = record.data.classes
        top = min(TOP, len(classes)) if self.top is None else self.top
        if not 1 <= top <= len(classes):
            raise ValueError(f"--top must be from 1 to {len(classes)}, the number of classes, not {top}")
        files = [file for path in self.images for file in _files(path)]
        out = None if self.csv is None else writable(str(self.csv))
        reader = training.image_input.ImageInput.of(record)
        return lambda: self._show(list(_classified(model, reader, files, classes, self.invert, top)), out, top)

    def _show(self, found: list[Entry], out: Path | None, top: int) -> int:
        bad = [entry for entry in found if "error" in entry]
        if len(bad) == len(found):
            more = f"; the other {len(bad) - 1} cannot be read either" if len(bad) > 1 else ""
            print(f"dcnet: {visible(bad[0]['error'])}{more}", file=sys.stderr)
            return BAD_INPUT
        for entry in bad:
            print(f"dcnet predict: {visible(entry['error'])}", file=sys.stderr)
        if out is not None:
            write_atomically(out, _csv(found, top).encode(errors="surrogateescape"))
        if self.json:
            print_json(found)
        elif out is not None:
            print(f"wrote {out}: {len(found) - len(bad)} of {len(found)} images classified")
        else:
            console().print(_table([entry for entry in found if "error" not in entry]))
        return FAILED if bad else 0


def _files(path: Path) -> list[Path]:
    """Returns the file, or the images in a folder and its subfolders, sorted by name, without hidden ones."""
    if not path.exists():
        raise ValueError(f"there is no file or folder {str(path)!r}: give images such as .png or .jpg")
    if not path.is_dir():
        return [path]
    suffixes = data.image_folder.SUFFIXES
    below = (file for file in path.rglob("*") if file.suffix.lower() in suffixes and file.is_file())
    found = sorted(file for file in below if not any(part.startswith(".") for part in file.relative_to(path).parts))
    if not found:
        raise ValueError(f"the folder {str(path)!r} has no images: expected files such as .png or .jpg, at any depth")
    return found


def _classified(
    model: nn.Module, reader: ImageInput, files: Sequence[Path], classes: list[str], invert: bool, top: int
) -> Iterator[Entry]:
    """Yields, for each file, its most probable classes, or why it cannot be read."""
    for start in range(0, len(files), BATCH):
        part = files[start : start + BATCH]
        inputs = {file: _read(reader, file, invert) for file in dict.fromkeys(part)}
        images = {file: pixels for file, pixels in inputs.items() if not isinstance(pixels, str)}
        best = dict(zip(images, training.image_input.classify(model, list(images.values()), top), strict=True))
        for file in part:
            if file not in best:
                yield {"image": str(file), "error": inputs[file]}
                continue
            named = [{"class": classes[i], "index": i, "probability": value} for i, value in best[file]]
            yield {"image": str(file), "classes": named}


def _read(reader: ImageInput, file: Path, invert: bool) -> Tensor | str:
    """Returns pixels [1, C, H, W], or an error message."""
    try:
        return reader.read([file], invert)
    except ValueError as error:
        return str(error)


def _csv(found: list[Entry], top: int) -> str:
    """Returns a table with a row per image: path, classes with probabilities, and error."""
    page = io.StringIO()
    columns = [f"{name}_{number}" for number in range(1, top + 1) for name in ("class", "probability")]
    table = csv.writer(page, lineterminator="\n")
    table.writerow(["image", *columns, "error"])
    for entry in found:
        cells = [cell for best in entry.get("classes", ()) for cell in (best["class"], best["probability"])]
        table.writerow([entry["image"], *(cells or [""] * len(columns)), entry.get("error", "")])
    return page.getvalue()


def _table(found: list[Entry]) -> Table:
    rows: list[list[str]] = []
    sections: list[int] = []
    for entry in found:
        sections.append(len(rows))
        for i, best in enumerate(entry["classes"]):
            name = "" if i else entry["image"]
            rows.append([name, best["class"], f"{100 * best['probability']:.2f}"])
    return Table.of_rows(["image", "class", "probability, %"], rows, names=2, sections=sections[1:])
