"""`dcnet plot filters`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import tyro

from dcnet.cli.plot_options import RunPlotOptions, drawn, picture, title_of
from dcnet.cli.run_options import OneRun, loaded


@dataclass(frozen=True, kw_only=True)
class Command(RunPlotOptions, OneRun):
    """Draw the filters of a run's first layer as images, each scaled by itself.

    Filters of images in grey are grey, those of images in colour are in colour.
    """

    layer: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: the first)")] = None
    """Another convolution, such as body.conv2.layer1.conv: a row for each filter, with its channels in grey."""

    def prepare(self) -> Callable[[], int]:
        from dcnet.report.filters import convolution, filter_images

        run = self.found()
        model, record = loaded(run)
        name, filters = convolution(model, self.layer)
        path = picture(self.out, run.folder / "filters.png")
        return drawn(path, lambda: filter_images(filters, f"{title_of(record)}: {name}"))
