"""`dcnet evaluate`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dcnet import report, training
from dcnet.cli.options import DataOptions, JsonOption, OneRun, load_run, report_bad_input
from dcnet.terminal import console, print_json, visible


@dataclass(frozen=True, kw_only=True)
class Command(JsonOption, DataOptions, OneRun):
    """Evaluate the network of a run on its test set, and compare the accuracy with the record.

    Prints accuracy, error and loss, and the classes with the lowest accuracy; with --json, all classes.
    """

    def prepare(self) -> Callable[[], int]:
        workers, device, run = self.chosen_workers(), self.chosen_device(), self.found()
        model, record = load_run(run)
        dataset = training.identity.load_run_data(record, self.data_dir)
        training.identity.check_classes(dataset, record)
        about = {"run": run.folder.name, "dataset": dataset.name, "device": device}

        def evaluate() -> int:
            found = report.evaluation_report.evaluate(model, record, dataset, device, workers)
            if self.json:
                print_json(about | found)
            else:
                _show(about, found)
            return 0

        return report_bad_input(evaluate)


def _show(about: dict[str, str], found: dict[str, Any]) -> None:
    loss = "not finite" if found["loss"] is None else format(found["loss"], ".4f" if found["loss"] < 1e4 else ".3g")
    run, dataset = visible(about["run"]), visible(about["dataset"])
    verdict = report.evaluation_report.verdict(found)
    print(f"{run}: {found['images']:,} test images of {dataset}, on {about['device']}")
    print(f"accuracy {found['accuracy']:.2f} %, error {found['error']:.2f} %, loss {loss}; {verdict}")
    console().print(report.evaluation_report.worst_classes(found))
