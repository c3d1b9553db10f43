"""`dcnet plot features`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from dcnet.cli.plot_options import drawn, picture
from dcnet.cli.run_options import DataFolder, RunsOptions, loaded

if TYPE_CHECKING:
    from dcnet.report.features import Features
    from dcnet.training import Run


@dataclass(frozen=True, kw_only=True)
class Command(RunsOptions):
    """Draw the features of test images, and the directions of their classes.

    The networks must end in two features, or in three, which are drawn on the sphere: train them with
    --margin m-softmax --features 2, for example.
    """

    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...", help_behavior_hint="")]
    """Runs: their folders, their names, or as much of the beginning or end of a name as no other run has."""

    data_dir: DataFolder = None
    """Where the datasets are."""

    out: Annotated[
        Path | None,
        tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: beside the run, ./features.png for several)"),
    ] = None
    """The picture, .png or .svg."""

    def prepare(self) -> Callable[[], int]:
        from dcnet.report.features import feature_plots
        from dcnet.training import find_run

        if not self.names:
            raise ValueError("there is nothing to draw without a run: name one or more, see `dcnet list runs`")
        runs = [find_run(name, self.root()) for name in dict.fromkeys(self.names)]
        panels = [self._features(run) for run in runs]
        classes = runs[0].record()["data"]["classes"]
        default = runs[0].folder / "features.png" if len(runs) == 1 else Path("features.png")
        return drawn(picture(self.out, default), lambda: feature_plots(panels, classes))

    def _features(self, run: Run) -> Features:
        import torch

        from dcnet.data import FolderDataset, load_dataset
        from dcnet.report.features import Features

        model, record = loaded(run)
        dataset = load_dataset(record["config"]["dataset"], self.data_dir)
        if isinstance(dataset, FolderDataset):
            raise ValueError(f"{run.folder.name} was trained on a folder of images: only datasets in memory are drawn")
        network: Any = model
        with torch.no_grad():
            batches = dataset.test.images.split(500)
            points = torch.cat([network.features(images.float() / 255) for images in batches])
        head = getattr(network.network, "head", None)
        title = ", ".join(str(record["config"][name]) for name in ("operator", "margin") if record["config"].get(name))
        return Features(title, points, dataset.test.labels, None if head is None else head.weight.detach())
