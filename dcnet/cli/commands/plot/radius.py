"""`dcnet plot radius`."""

from collections.abc import Callable
from dataclasses import dataclass

from dcnet.cli.plot_options import RunPlotOptions, drawn, picture, title_of
from dcnet.cli.run_options import OneRun, loaded


@dataclass(frozen=True, kw_only=True)
class Command(RunPlotOptions, OneRun):
    """Draw the radius rho that each decoupled layer of a run has learned, and where it started.

    A box has the quartiles of a layer's channels, from the first layer down.
    """

    def prepare(self) -> Callable[[], int]:
        from dcnet.report.radii import learned_radii, radius_boxes

        run = self.found()
        model, record = loaded(run)
        found = learned_radii(model)
        return drawn(picture(self.out, run.folder / "radius.png"), lambda: radius_boxes(found, title_of(record)))
