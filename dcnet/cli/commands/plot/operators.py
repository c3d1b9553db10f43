"""`dcnet plot operators`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from dcnet.cli.plot_options import drawn, picture


@dataclass(frozen=True, kw_only=True)
class Command:
    """Draw operators: the answer by the norm of the patch, and by its angle to the filter."""

    operators: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SPEC ...", help_behavior_hint="(default: all)")] = ()
    """Operators such as tanh-cos, "seg(slope=0.2)-sqcos+linear" or conv; without any, all magnitudes and angles."""

    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("operators.png")
    """The picture, .png or .svg."""

    def prepare(self) -> Callable[[], int]:
        from dcnet.report.operator_plots import operator_curves
        from dcnet.report.options import one_operator

        specs = list(dict.fromkeys(one_operator(spec) for spec in self.operators))
        return drawn(picture(self.out, self.out), lambda: operator_curves(specs))
