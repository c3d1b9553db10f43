"""All that README and docs show of records, made anew: `make results` fails where something had been stale."""

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from dcnet.files import write_atomically
from dcnet.report import feature_docs, plots, tables
from dcnet.report.curves import run_curves
from dcnet.report.margin_plots import margin_curves
from dcnet.report.operator_plots import operator_curves

RESULTS, IMAGES = Path("results"), Path("docs/images")
# Of 255: the rounding of another processor moves the shade of an edge, which is not another picture.
SHADE = 8

# The pictures of benchmarks by their files, with the records that they are drawn from.
BENCHMARKS = {"speed_cuda.png": "layers_cuda", "heads_cpu.png": "heads_cpu", "heads_cuda.png": "heads_cuda"}


def main() -> int:
    """Writes what is stale, names it, and gives the exit code: 1 if there was any, 2 if something cannot be made."""
    try:
        return _made_anew()
    except (FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2


def _made_anew() -> int:
    stale = [file for file in tables.FILES if _text(Path(file))]
    stale += [str(IMAGES / name) for name, figure in pictures() if _picture(IMAGES / name, figure)]
    for file in stale:
        print(f"{file} was stale and has been made anew", file=sys.stderr)
    return 1 if stale else 0


def pictures() -> Iterator[tuple[str, Figure]]:
    """The pictures of the docs whose records are there, by the names of their files."""
    yield "operators.png", operator_curves()
    yield "geometry.png", plots.geometry()
    yield "margins.png", margin_curves([], 4.0)
    digits = sorted((RESULTS / "digits").glob("*.json"))
    if digits:
        yield "curves.png", run_curves([_read(file) for file in digits])
    for name, record in BENCHMARKS.items():
        file = RESULTS / f"{record}.json"
        if file.exists():
            yield name, plots.benchmark(_read(file))
    yield from feature_docs.pictures(RESULTS).items()


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def _text(file: Path) -> bool:
    """Whether the tables in the file were not those of the records; they are now."""
    before = file.read_text(encoding="utf-8")
    try:
        after = tables.fill(before, RESULTS)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    if after != before:
        write_atomically(file, after.encode())
    return after != before


def _picture(file: Path, figure: Figure) -> bool:
    """Whether the file was missing or showed something else; it does not any more."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=plots.DPI)
    if file.exists() and same_picture(file.read_bytes(), content.getvalue()):
        return False
    write_atomically(file, content.getvalue())
    return True


def same_picture(first: bytes, second: bytes) -> bool:
    """Whether two PNG files look the same, up to shades that nobody sees."""
    one, other = (np.asarray(Image.open(io.BytesIO(part)).convert("RGBA"), dtype=np.int16) for part in (first, second))
    return one.shape == other.shape and bool((np.abs(one - other) <= SHADE).all())


if __name__ == "__main__":
    sys.exit(main())
