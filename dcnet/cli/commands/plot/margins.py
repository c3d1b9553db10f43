"""`dcnet plot margins`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from dcnet.cli.plot_options import drawn, picture


@dataclass(frozen=True, kw_only=True)
class Command:
    """Draw margins: what they ask of the angle, how annealing lets them in, and how hard they pull."""

    margins: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SPEC ...", help_behavior_hint="(default: all)")] = ()
    """Margins such as a-softmax or "arcface(m=0.3)", see `dcnet list margins`."""

    m: Annotated[float, tyro.conf.arg(metavar="NUMBER")] = 4.0
    """Multiple of the angle in the picture of annealing."""

    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("margins.png")
    """The picture, .png or .svg."""

    def prepare(self) -> Callable[[], int]:
        from dcnet.losses import ASoftmax, as_margin
        from dcnet.report.margin_plots import margin_curves

        ASoftmax(m=self.m)
        # As specs are written in one way, what is the same is drawn once.
        specs = list(dict.fromkeys(str(as_margin(spec)) for spec in self.margins))
        return drawn(picture(self.out, self.out), lambda: margin_curves(specs, self.m))
