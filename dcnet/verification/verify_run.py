"""Verification with the network of a run: calibrates thresholds on pairs, compares two images, reports on pairs."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dcnet import training
from dcnet.files import fingerprint
from dcnet.training import Evaluation, Record, Run
from dcnet.verification.embeddings import embed, pair_scores
from dcnet.verification.measures import Folds, count_pairs, pair_measures, retrieval_measures
from dcnet.verification.pairs import LfwData, Pairs, folder_of, people_disjoint, read_pairs
from dcnet.verification.roc_curve import Roc, roc
from dcnet.verification.threshold import Calibration, Verdict, calibrate_curve

CALIBRATION_FILE = "verification.json"
LFW_LIST = "pairs"
# Two reports of the same name are on different pairs if one of these entries differs.
IDENTIFYING = ("list_file", "images", "pairs", "same", "files")


@dataclass(frozen=True)
class PairList:
    """Pairs of image files.

    Args:
        pairs: the pairs, with the names of their files.
        root: the folder of the files.
        about: a description of the pairs, as plain values.
    """

    pairs: Pairs
    root: Path
    about: dict[str, Any]

    @property
    def paths(self) -> list[Path]:
        return [self.root / name for name in self.pairs.names]

    def __str__(self) -> str:
        about = self.about
        text = f"{about['pairs']:,} pairs, {about['same']:,} same and {about['different']:,} different, "
        left_out = f", without {about['left_out']:,} that show a training class" if about["left_out"] else ""
        return f"{text}of {about['list']}{left_out}"


def read_pair_list(
    classes: Sequence[str],
    file: Path | None = None,
    images: Path | None = None,
    lfw: Path | None = None,
    lfw_list: str | None = None,
    unseen: bool = False,
) -> PairList:
    """Reads a list of pairs, which must have both kinds; notes if some pairs show training classes.

    Args:
        classes: the classes that the run was trained on.
        file: a list of pairs; None for a list of LFW.
        images: the folder of the images; None for the folder of the list.
        lfw: the folder of LFW.
        lfw_list: the list of LFW.
        unseen: leave out pairs with an image in a folder that has the name of a training class.
    """
    every, root, named = _read(file, images, lfw, lfw_list or LFW_LIST)
    pairs = people_disjoint(every, classes).pairs if unseen else every
    counts = count_pairs(pairs)
    if 0 in (counts["same"], counts["different"]):
        kind = "same" if counts["same"] == 0 else "different"
        raise ValueError(f"{named['list']} has {len(pairs):,} pairs, but none is {kind!r}: both kinds are needed")
    known = 0 if unseen else _count_known(pairs, classes)
    note = f"{known:,} of {len(pairs):,} pairs show a class that the run was trained on, which is easier: see --unseen"
    about = {
        **named,
        "name": named["name"].removesuffix(".txt") + ("-unseen" if unseen else ""),
        "images": str(root.resolve()),
        "files": len(pairs.names),
        **counts,
        "left_out": len(every) - len(pairs),
        "notes": [note] if known else [],
    }
    return PairList(pairs, root, about)


def _read(
    file: Path | None, images: Path | None, lfw: Path | None, lfw_list: str
) -> tuple[Pairs, Path, dict[str, str]]:
    """The pairs of a list, the folder of their images, and the names of report, list and list file."""
    if file is not None:
        root, name, shown = images or file.parent, f"pairs-{file.stem}", str(file)
        return read_pairs(file, root), root, {"name": name, "list": shown, "list_file": str(file.resolve())}
    assert lfw is not None
    data = LfwData.found_in(lfw, lfw_list)
    path = str(data.list_file(lfw_list).resolve())
    named = {"name": f"lfw-{lfw_list}", "list": f"LFW {lfw_list}", "list_file": path}
    return data.pairs(lfw_list), data.root, named


def _count_known(pairs: Pairs, classes: Sequence[str]) -> int:
    """The number of pairs with an image in a folder that has the name of a class."""
    known = torch.tensor([folder_of(name) in classes for name in pairs.names], device="cpu")
    return int((known[pairs.first] | known[pairs.second]).sum())


@dataclass(frozen=True)
class PairReport:
    """The measures of a run on pairs, as plain values for the record, with the scores [P] and their ROC curve."""

    values: dict[str, Any]
    scores: Tensor
    curve: Roc

    @property
    def notes(self) -> list[str]:
        """Notes on the data, the folds, mirror images, and rates with too few pairs, as sentences."""
        values = self.values
        too_few = [at["note"] for at in values["tar_at_far"] if at["note"]][:1]
        found = [*values["data"]["notes"], values["fold_note"], values["flip_note"], *too_few]
        return [note for note in found if note]


@dataclass(frozen=True)
class Stored:
    """How a report was stored in the record.

    Args:
        name: the name of the report.
        replaced: the pairs of the report that it replaced; None if they were the same.
        error: why the report could not be stored; empty if it was.
    """

    name: str
    replaced: dict[str, Any] | None = None
    error: str = ""


@dataclass(frozen=True)
class RunVerifier:
    """The network of a run, which compares images by the cosine of their features.

    Args:
        run: the run.
        model: its network, with `features`.
        record: its record.
        device: the device to compute on.
        read: reads files as batches of images for this network.
    """

    run: Run
    model: nn.Module
    record: Record
    device: str
    read: Callable[[Sequence[Path]], Iterable[Tensor]]

    def __post_init__(self) -> None:
        network = getattr(self.model, "network", self.model)
        if not callable(getattr(network, "features", None)):
            raise ValueError(
                f"the run {self.run.folder.name!r} has no features to compare: its network, {type(network).__name__}, "
                "has no method `features`"
            )

    @property
    def name(self) -> str:
        # The path "." has no name.
        return self.run.folder.resolve().name

    @property
    def calibration_file(self) -> Path:
        return self.run.folder / CALIBRATION_FILE

    @cached_property
    def weights(self) -> str:
        """The fingerprint of the weights."""
        return fingerprint(self.run.model_file)

    def embeddings(self, paths: Sequence[Path], flip: bool) -> Tensor:
        """Embeddings float32 of the files, on the device."""
        return embed(self.model, self.read(paths), self.device, flip, names=[str(path) for path in paths])

    def calibration(self) -> Calibration:
        """The stored calibration; raises ValueError with advice if it is missing, or is for other weights."""
        command = f"`dcnet verify {self.run.folder} --calibrate --pairs FILE --images FOLDER`"
        if not self.calibration_file.exists():
            raise ValueError(f"the run {self.name!r} is not calibrated, so it has no thresholds: use {command}")
        calibration = Calibration.load(self.calibration_file)
        if calibration.weights != self.weights:
            raise ValueError(
                f"the run {self.name!r} has other weights than when it was calibrated: use {command} again"
            )
        return calibration

    def calibrate(self, listed: PairList, far: float, frr: float, flip: bool) -> Calibration:
        """Calibrates the thresholds on pairs, and stores them beside the record."""
        # Computed first, since training may replace the weights meanwhile.
        weights, pairs = self.weights, listed.pairs
        scores = pair_scores(self.embeddings(listed.paths, flip), pairs.first, pairs.second).cpu()
        decision = calibrate_curve(roc(scores, pairs.same), far, frr)
        calibration = Calibration(decision, listed.about, weights, flip)
        calibration.save(self.calibration_file)
        return calibration

    def compare(self, files: Sequence[Path], calibration: Calibration) -> Verdict:
        """The verdict on two images."""
        embeddings = self.embeddings(files, calibration.flip)
        return calibration.decision.decide(float(pair_scores(embeddings, torch.tensor([0]), torch.tensor([1]))))

    def report(self, listed: PairList, folds: Folds, flip: bool) -> PairReport:
        """All measures on the pairs; retrieval is None if folders are not classes."""
        pairs, embeddings = listed.pairs, self.embeddings(listed.paths, flip)
        scores = pair_scores(embeddings, pairs.first, pairs.second).cpu()
        curve = roc(scores, pairs.same)
        values = {
            "run": self.name,
            "data": listed.about,
            "flip": flip,
            **pair_measures(scores, pairs.same, folds.numbers, curve),
            "retrieval": retrieval_measures(embeddings, pairs),
            "fold_note": folds.note,
            "flip_note": self._flip_note(flip),
        }
        return PairReport(values, scores, curve)

    def _flip_note(self, flip: bool) -> str:
        """A sentence if only one of the run's calibration and this report uses mirror images."""
        try:
            calibrated = self.calibration().flip
        except ValueError:
            # Without a valid calibration there are no verdicts that could differ.
            return ""
        if calibrated == flip:
            return ""
        if flip:
            return "the run is calibrated without mirror images, and this report has them: see --no-flip"
        return "the run is calibrated with mirror images, and this report leaves them out: omit --no-flip"

    def store(self, values: dict[str, Any]) -> Stored:
        """Adds the values of a report to the record; returns the error if that fails, as in a read-only folder."""
        name = values["data"]["name"] + ("" if values["flip"] else "-no-flip")
        try:
            replaced = _other_pairs(self.run.record().evaluations.get(name), values["data"])
            training.add_evaluation(self.run, name, {key: value for key, value in values.items() if key != "run"})
        except (OSError, ValueError) as error:
            return Stored(name, error=str(error))
        return Stored(name, replaced)


def _other_pairs(report: Evaluation | None, about: dict[str, Any]) -> dict[str, Any] | None:
    """The pairs of an older report if they are other pairs than `about`, otherwise None."""
    before = None if report is None else report.get("data")
    if not isinstance(before, dict) or all(before.get(key, about[key]) == about[key] for key in IDENTIFYING):
        return None
    return before
