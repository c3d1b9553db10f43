"""`dcnet plot curves`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from dcnet.cli.plot_options import drawn, picture
from dcnet.cli.run_options import RunsOptions, records_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Command(RunsOptions):
    """Draw test error, training loss and learning rate of runs over their epochs.

    Runs that differ in nothing but the seed are one curve, their mean, in a band from the least to the largest. Dotted
    lines are where the learning rate dropped.
    """

    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...", help_behavior_hint="")]
    """Runs: their folders, their names, or as much of the beginning or end of a name as no other run has."""

    metric: Literal["error", "accuracy"] = "error"
    """What to draw of the test set."""

    out: Annotated[
        Path | None,
        tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: beside the run, ./curves.png for several)"),
    ] = None
    """The picture, .png or .svg."""

    def prepare(self) -> Callable[[], int]:
        from dcnet.training import find_run

        if not self.names:
            raise ValueError("there is nothing to draw without a run: name one or more, see `dcnet list runs`")
        runs = list(
            {run.folder.resolve(): run for run in (find_run(name, self.root()) for name in self.names)}.values()
        )
        # Made now, since what is wrong with a record has to be said before anything is written.
        figure = self._figure(records_of(runs))
        default = runs[0].folder / "curves.png" if len(runs) == 1 else Path("curves.png")
        return drawn(picture(self.out, default), lambda: figure)

    def _figure(self, records: list[dict[str, Any]]) -> Figure:
        from dcnet.report.curves import run_curves

        try:
            return run_curves(records, self.metric)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"the curves cannot be drawn, since some record is not as it should be: {error!r}"
            ) from None
