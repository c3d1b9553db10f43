"""What all pictures share: the file that they go to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from dcnet.escapes import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg")
BESIDE_RUN = "(default: beside the run)"


def out(hint: str) -> object:
    """How the option --out is shown."""
    return tyro.conf.arg(metavar="FILE", help_behavior_hint=hint)


@dataclass(frozen=True, kw_only=True)
class RunPlotOptions:
    """Where the picture of a run goes."""

    out: Annotated[Path | None, out(BESIDE_RUN)] = None
    """The picture, .png or .svg."""


def picture(asked: Path | None, default: Path, formats: Sequence[str] = FORMATS) -> Path:
    """The file to draw into, if it can be written."""
    from dcnet.report.options import writable

    path = default if asked is None else asked
    if path.suffix.lower() not in formats:
        raise ValueError(f"--out is written as {' or '.join(formats)}, not as {path.suffix!r} of {str(path)!r}")
    return writable(str(path))


def drawn(path: Path, draw: Callable[[], Figure]) -> Callable[[], int]:
    """The work: draws into the file and says so."""

    def work() -> int:
        from dcnet.report import plots

        plots.save(draw(), path)
        print(f"wrote {visible(path)}")
        return 0

    return work


def title_of(record: dict[str, Any]) -> str:
    """What the picture of a run is of."""
    config = record["config"]
    return ", ".join(str(config[name]) for name in ("dataset", "model", "operator"))
