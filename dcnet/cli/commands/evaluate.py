"""`dcnet evaluate`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from dcnet.cli.bench_options import Device, at_least, chosen_device
from dcnet.cli.run_options import WRONG_INPUT, DataFolder, OneRun, loaded
from dcnet.environment import default_workers
from dcnet.escapes import visible

if TYPE_CHECKING:
    from dcnet.data import Dataset, FolderDataset
    from dcnet.training import Run


@dataclass(frozen=True, kw_only=True)
class Command(OneRun):
    """Test the network of a run once more, and compare with its record.

    Prints accuracy, error and loss on the test set, and the classes that are told worst.
    """

    data_dir: DataFolder = None
    """Where the datasets are; what is missing is downloaded to a cache."""

    device: Device = "auto"
    """Where to compute; auto is cuda where there is a GPU."""

    workers: Annotated[int, tyro.conf.arg(metavar="N")] = field(default_factory=default_workers)
    """Processes that read a folder of images; by default one a core, up to 8."""

    json: bool = False
    """Print one JSON document, with all classes, and nothing else."""

    def prepare(self) -> Callable[[], int]:
        from dcnet.report.evaluation import check_dataset
        from dcnet.training.identity import data_of

        at_least(0, "--workers", self.workers)
        device, run = chosen_device(self.device), self.found()
        model, record = loaded(run)
        dataset = data_of(record, self.data_dir)
        check_dataset(dataset, record)
        return lambda: self._evaluate(run, model, record, dataset, device)

    def _evaluate(self, run: Run, model: Any, record: Any, dataset: Dataset | FolderDataset, device: str) -> int:
        import torch

        from dcnet.report.evaluation import evaluate
        from dcnet.report.listing import print_json

        try:
            found = evaluate(model, record, dataset, torch.device(device), self.workers)
        except ValueError as error:
            # Of images in a folder it is known only now whether they can be read.
            print(f"dcnet: {visible(error)}", file=sys.stderr)
            return WRONG_INPUT
        about = {"run": run.folder.name, "dataset": dataset.name, "device": device}
        if self.json:
            print_json(about | found)
        else:
            self._show(about, found)
        return 0

    def _show(self, about: dict[str, str], found: dict[str, Any]) -> None:
        from dcnet.report.evaluation import verdict, worst
        from dcnet.report.listing import console

        loss = "not finite" if found["loss"] is None else format(found["loss"], ".4f" if found["loss"] < 1e4 else ".3g")
        run, dataset = visible(about["run"]), visible(about["dataset"])
        print(f"{run}: {found['images']:,} test images of {dataset}, on {about['device']}")
        print(f"accuracy {found['accuracy']:.2f} %, error {found['error']:.2f} %, loss {loss}; {verdict(found)}")
        console().print(worst(found))
