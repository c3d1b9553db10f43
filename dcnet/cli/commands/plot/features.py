"""`dcnet plot features`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from dcnet.cli.feature_options import Drawn, frames_of_run, records_for
from dcnet.cli.plot_options import drawn, picture
from dcnet.cli.run_options import DataFolder, RunsOptions
from dcnet.escapes import visible

if TYPE_CHECKING:
    from dcnet.training import Run

MOVING = (".gif",)


@dataclass(frozen=True, kw_only=True)
class Command(RunsOptions):
    """Draw the features of test images, and the directions of their classes.

    The networks must end in two features, or in three, which are drawn on the sphere. Two lines show how:

    dcnet train --recipe features --margin a-softmax

    dcnet plot features mnist
    """

    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...", help_behavior_hint="")]
    """Runs: their folders, their names, as much of the beginning or end of a name as no other run has, or .json files
    of --records."""

    animate: bool = False
    """Draw a GIF of how the features moved, of runs with --feature-snapshots, which the recipe features has."""

    records: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="(optional)")] = None
    """Write what is drawn of each run into this folder as .json, too."""

    data_dir: DataFolder = None
    """Where the datasets are."""

    out: Annotated[
        Path | None,
        tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: beside the run, ./features.png for several)"),
    ] = None
    """The picture, .png or .svg, or .gif with --animate."""

    def prepare(self) -> Callable[[], int]:
        if not self.names:
            raise ValueError("there is nothing to draw without a run: name one or more, see `dcnet list runs`")
        if self.animate and self.records is not None:
            raise ValueError("--animate draws what a run kept and --records what its network gives: give one of them")
        names = list(dict.fromkeys(self.names))
        return self._moving(names) if self.animate else self._still(names)

    def _still(self, names: list[str]) -> Callable[[], int]:
        from dcnet.report.feature_plots import feature_plots

        found = [Drawn.of(name, self.root(), self.data_dir) for name in names]
        records = {} if self.records is None else records_for(found, self.records)
        # Drawn now, since what does not fit together has to be said before anything is written.
        figure = feature_plots([one.features for one in found])
        draw = drawn(picture(self.out, self._beside([one.run for one in found], "features.png")), lambda: figure)

        def work() -> int:
            from dcnet.report.features import write_features

            for path, record in records.items():
                write_features(path, record)
                print(f"wrote {visible(path)}")
            return draw()

        return work

    def _moving(self, names: list[str]) -> Callable[[], int]:
        from dcnet.training import find_run

        runs = [find_run(name, self.root()) for name in names]
        frames = [frames_of_run(run) for run in runs]
        path = picture(self.out, self._beside(runs, "features.gif"), MOVING)

        def work() -> int:
            from dcnet.files import write_atomically
            from dcnet.report.animation import feature_animation

            write_atomically(path, feature_animation(frames))
            print(f"wrote {visible(path)}")
            return 0

        return work

    def _beside(self, runs: list[Run | None] | list[Run], name: str) -> Path:
        """In the folder of the only run, or else here."""
        return runs[0].folder / name if len(runs) == 1 and runs[0] is not None else Path(name)
