"""`dcnet verify`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from dcnet.cli.bench_options import Device, chosen_device
from dcnet.cli.embedding import Comparer
from dcnet.cli.pair_options import Listed, PairOptions
from dcnet.cli.plot_options import RunPlotOptions, picture
from dcnet.cli.run_options import OneRun
from dcnet.cli.verify_work import FILE, Told, answer, calibrate, calibration_of, report, shown

FAR, FRR = 1e-3, 1e-2


@dataclass(frozen=True, kw_only=True)
class Command(RunPlotOptions, PairOptions, OneRun):
    """Say whether two images show the same, whether or not the network was trained on it.

    dcnet verify RUN --calibrate --pairs FILE sets the thresholds of a run by pairs whose answers are known; after that,
    dcnet verify RUN a.jpg b.jpg says the same, different, or too close to call. With pairs and without --calibrate it
    tells how well the run does on them: accuracy over folds, AUC, EER, TAR@FAR, and a picture of the ROC curve; also
    recall@k and mAP where the images of each class are in a folder of their own.

    What is compared are the features before the last layer, of each image and its mirror image, by their cosine.
    """

    files: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[IMAGE IMAGE]", help_behavior_hint="")
    ]
    """Two files such as .png or .jpg."""

    calibrate: bool = False
    """Set the thresholds of the run by the pairs, and keep them beside its record."""

    far: Annotated[float | None, tyro.conf.arg(metavar="RATE", help_behavior_hint=f"(default: {FAR})")] = None
    """For --calibrate: the share of different pairs that may be told the same."""

    frr: Annotated[float | None, tyro.conf.arg(metavar="RATE", help_behavior_hint=f"(default: {FRR})")] = None
    """For --calibrate: the share of same pairs that may be told different."""

    no_flip: bool = False
    """For pairs: leave mirror images out, as for digits; a calibration remembers it."""

    device: Device = "auto"
    """Where to compute; auto is cuda where there is a GPU."""

    json: bool = False
    """Print one JSON document, and nothing else."""

    def prepare(self) -> Callable[[], int]:
        self._check()
        comparer = Comparer.of(self.found(), chosen_device(self.device))
        if self.files:
            calibration = calibration_of(comparer)
            return shown(lambda: answer(comparer, self.files, calibration), self.json)
        listed = self.read(comparer.record["data"]["classes"])
        return shown(self._of_pairs(comparer, listed), self.json)

    def _of_pairs(self, comparer: Comparer, listed: Listed) -> Callable[[], Told]:
        from dcnet.report.options import writable
        from dcnet.verification.measures import Folds

        flip = not self.no_flip
        if self.calibrate:
            kept = writable(str(comparer.run.folder / FILE))
            wanted = (FAR if self.far is None else self.far, FRR if self.frr is None else self.frr)
            return lambda: calibrate(comparer, listed, kept, wanted, flip)
        # Too few pairs for folds are known before a folder is made for the picture.
        folds = Folds.of(listed.pairs)
        drawn = picture(self.out, comparer.run.folder / "roc.png")
        return lambda: report(comparer, listed, folds, drawn, flip)

    def _check(self) -> None:
        """Refuses options that do not go together, before anything is read."""
        from dcnet.verification.curves import check_rate

        self.check_pairs()
        self._check_kind()
        for option, given, other, wanted in (
            ("--far", self.far is not None, "--calibrate", self.calibrate),
            ("--frr", self.frr is not None, "--calibrate", self.calibrate),
            ("--unseen", self.unseen, "--pairs or --lfw", self.listed),
            ("--no-flip", self.no_flip, "--pairs or --lfw", self.listed),
            ("--out", self.out is not None, "a report on --pairs or --lfw", self.listed and not self.calibrate),
        ):
            if given and not wanted:
                raise ValueError(f"{option} goes with {other}, and has no meaning here")
        for option, rate in (("--far", self.far), ("--frr", self.frr)):
            if rate is not None:
                check_rate(option, rate)

    def _check_kind(self) -> None:
        if self.calibrate and not self.listed:
            raise ValueError("--calibrate needs pairs whose answers are known: give --pairs FILE or --lfw FOLDER")
        if bool(self.files) == self.listed:
            given = "both" if self.listed else "nothing"
            raise ValueError(f"give two images, or a list of pairs by --pairs or --lfw, not {given}")
        if self.files and len(self.files) != 2:
            raise ValueError(f"two images are compared, not {len(self.files)}: for more give a list by --pairs")
