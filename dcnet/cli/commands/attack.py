"""`dcnet attack`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from dcnet.cli.attack_options import attacked_images, check_epsilon, check_source_run, epsilon_of, fingerprint_of
from dcnet.cli.attack_work import Attacked, attack, pictures_beside
from dcnet.cli.bench_options import Device, at_least, chosen_device
from dcnet.cli.run_options import DataFolder, OneRun, described, loaded
from dcnet.environment import default_workers

if TYPE_CHECKING:
    from dcnet.training import Run

OPTIONAL = "(optional)"


@dataclass(frozen=True, kw_only=True)
class Command(OneRun):
    """Attack the network of a run, and say how robust it is and whether to believe it.

    Measures what FGSM, BIM, PGD, AutoAttack, a transfer from another run and corruptions leave of the accuracy, and at
    which epsilon nothing is left, looks for masked gradients, and ends in a verdict. All of it is kept in the record of
    the run, measurement by measurement: after Ctrl-C the same command goes on.
    """

    source: Annotated[str | None, tyro.conf.arg(metavar="RUN", help_behavior_hint=OPTIONAL)] = None
    """A run with the same classes, such as a plain twin, from which attacks are transferred."""

    images: Annotated[int, tyro.conf.arg(metavar="N")] = 1000
    """How many test images are attacked, of all classes alike; all of them where there are fewer."""

    epsilon: Annotated[str, tyro.conf.arg(metavar="SIZE")] = "8/255"
    """By how much each pixel may change, of pixels from 0 to 1: a number, or a fraction."""

    quick: bool = False
    """Weaker attacks and no AutoAttack, for a first look in a small part of the time."""

    report: Annotated[Path | None, tyro.conf.arg(metavar="FILE.md", help_behavior_hint=OPTIONAL)] = None
    """Write the report card as Markdown, with two pictures beside it."""

    data_dir: DataFolder = None
    """Where the datasets are; what is missing is downloaded to a cache."""

    device: Device = "auto"
    """Where to compute; auto is cuda where there is a GPU."""

    workers: Annotated[int, tyro.conf.arg(metavar="N")] = field(default_factory=default_workers)
    """Processes that read a folder of images; by default one a core, up to 8."""

    json: bool = False
    """Print one JSON document, and nothing else."""

    def prepare(self) -> Callable[[], int]:
        epsilon = check_epsilon(epsilon_of(self.epsilon))
        at_least(1, "--images", self.images)
        at_least(0, "--workers", self.workers)
        self._check_report()
        device, run = chosen_device(self.device), self.found()
        return attack(self._attacked(run, epsilon, device), self.json)

    def _check_report(self) -> None:
        from dcnet.report.options import writable

        if self.report is None:
            return
        if self.report.suffix.lower() != ".md":
            raise ValueError(f"--report is written as .md, not as {self.report.suffix!r} of {str(self.report)!r}")
        for path in (self.report, *pictures_beside(self.report)):
            writable(str(path))

    def _attacked(self, run: Run, epsilon: float, device: str) -> Attacked:
        from dcnet.robustness.subject import QUICK, STANDARD, Subject, check_pixels
        from dcnet.verification import fingerprint

        model, record = loaded(run)
        source, about_source = self._source(record)
        images, labels, dataset = attacked_images(record, self.images, self.data_dir, self.workers)
        for network in (model, source):
            if network is not None:
                network.to(device)
        check_pixels(model, images, labels)
        effort = QUICK if self.quick else STANDARD
        subject = Subject(model, images, labels, epsilon, source, effort)
        config = record["config"]
        about = {
            "dataset": dataset,
            "network": ", ".join(str(config[name]) for name in ("dataset", "model", "operator")),
            "device": device,
            "weights": fingerprint(run.model_file),
            "pixels": fingerprint_of(images, labels),
        }
        return Attacked(run, subject, about, about_source, self._words(), self.report)

    def _source(self, record: dict[str, Any]) -> tuple[Any, dict[str, str] | None]:
        """The network that attacks are transferred from, and which it is."""
        from dcnet.training import find_run
        from dcnet.verification import fingerprint

        if self.source is None:
            return None, None
        run = find_run(self.source, self.root())
        with described(run):
            check_source_run(record, run.record(), run.folder.name)
        return loaded(run)[0], {"run": run.folder.resolve().name, "weights": fingerprint(run.model_file)}

    def _words(self) -> list[str]:
        """The command once more, with what is not as by default."""
        words = [self.run]
        for option, value, default in (
            ("--source", self.source, None),
            ("--images", self.images, 1000),
            ("--epsilon", self.epsilon, "8/255"),
            ("--report", self.report, None),
            ("--runs", self.runs, None),
            ("--data-dir", self.data_dir, None),
            ("--device", self.device, "auto"),
            ("--workers", self.workers, default_workers()),
        ):
            words += [] if value == default else [option, str(value)]
        return [*words, *(["--quick"] if self.quick else []), *(["--json"] if self.json else [])]
