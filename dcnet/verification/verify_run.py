"""Verification with the network of a run: calibrates thresholds on pairs, compares two images, reports on pairs."""

import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dcnet import training
from dcnet.files import fingerprint, write_atomically
from dcnet.training import Evaluation, Record, Run
from dcnet.verification.embeddings import embed, pair_scores
from dcnet.verification.folds import Folds
from dcnet.verification.intervals import PeopleBootstrap
from dcnet.verification.measures import (
    pair_measures,
    quality_measures,
    retrieval_measures,
    transfer_values,
)
from dcnet.verification.pair_list import PairList
from dcnet.verification.pairs import Pairs, folder_of
from dcnet.verification.quality import fit_quality, norms_of, pair_quality
from dcnet.verification.roc_curve import Roc, roc
from dcnet.verification.threshold import Calibration, Decision, Verdict, calibrate_curve, transfer

CALIBRATION_FILE = "verification.json"
# Two reports of the same name are on different pairs if one of these entries differs.
IDENTIFYING = ("list_file", "images", "pairs", "same", "files")


@dataclass(frozen=True)
class PairReport:
    """The measures of a run on pairs, as plain values for the record.

    Also has the scores [P] and their ROC curve, and the embeddings [N, D].
    """

    values: dict[str, Any]
    scores: Tensor
    curve: Roc
    embeddings: Tensor

    @property
    def notes(self) -> list[str]:
        """Notes on the data, the folds, mirror images, and rates with too few pairs, as sentences."""
        values = self.values
        too_few = [at["note"] for at in values["tar_at_far"] if at["note"]][:1]
        found = [*values["data"]["notes"], values["fold_note"], values["flip_note"], values["twin_note"], *too_few]
        return [note for note in found if note]


@dataclass(frozen=True)
class Comparison:
    """The verdict on two images, the cosine of their features, and the norms of both."""

    verdict: Verdict
    cosine: float
    norms: tuple[float, float]


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
        command = f"`dcnet verify {self.run.folder} --calibrate --people FOLDER`"
        if not self.calibration_file.exists():
            raise ValueError(f"the run {self.name!r} is not calibrated, so it has no thresholds: use {command}")
        calibration = Calibration.load(self.calibration_file)
        if calibration.weights != self.weights:
            raise ValueError(
                f"the run {self.name!r} has other weights than when it was calibrated: use {command} again"
            )
        return calibration

    def _valid_calibration(self) -> Calibration | None:
        """The stored calibration; None if it is missing, invalid or for other weights."""
        try:
            return self.calibration()
        except ValueError:
            return None

    def calibrate(
        self, listed: PairList, far: float, frr: float, flip: bool, by_norm: bool = False
    ) -> tuple[Calibration, Tensor]:
        """Calibrates the thresholds on pairs, and stores them beside the record; also returns the embeddings."""
        # Computed first, since training may replace the weights meanwhile.
        weights, pairs, embeddings = self.weights, listed.pairs, self.embeddings(listed.paths, flip)
        scores, quality = _scores(embeddings, pairs), None
        if by_norm:
            norms = pair_quality(norms_of(embeddings), pairs.first, pairs.second)
            quality = fit_quality(scores, pairs.same, norms)
            scores = quality(scores, norms)
        decision = calibrate_curve(roc(scores, pairs.same), far, frr)
        about = listed.about | _rate_intervals(scores, listed, decision)
        calibration = Calibration(decision, about, weights, flip, quality)
        calibration.save(self.calibration_file)
        return calibration, embeddings

    def compare(self, files: Sequence[Path], calibration: Calibration) -> Comparison:
        """The verdict on two images."""
        embeddings = self.embeddings(files, calibration.flip)
        pair = Pairs(torch.tensor([0]), torch.tensor([1]), torch.tensor([True]))
        cosine, norms = float(_scores(embeddings, pair)), norms_of(embeddings)
        score = float(calibration.scores(embeddings, pair))
        return Comparison(calibration.decision.decide(score), cosine, (float(norms[0]), float(norms[1])))

    def report(self, listed: PairList, folds: Folds, flip: bool) -> PairReport:
        """All measures on the pairs; retrieval is None if folders are not classes."""
        pairs, people, embeddings = listed.pairs, listed.people, self.embeddings(listed.paths, flip)
        scores = _scores(embeddings, pairs)
        curve, both = roc(scores, pairs.same), None if people is None else (people[pairs.first], people[pairs.second])
        values = {
            "run": self.name,
            "data": listed.about,
            "flip": flip,
            **pair_measures(scores, pairs.same, folds.numbers, curve, both),
            "quality": quality_measures(scores, pairs, folds.numbers, norms_of(embeddings)),
            "calibrated": self._calibrated(embeddings, listed, flip),
            "retrieval": retrieval_measures(embeddings, pairs),
            "fold_note": folds.note,
            "flip_note": self._flip_note(flip),
            "twin_note": _twin_note(scores, pairs),
        }
        return PairReport(values, scores, curve, embeddings)

    def _calibrated(self, embeddings: Tensor, listed: PairList, flip: bool) -> dict[str, Any] | None:
        """The stored upper threshold applied to these pairs; None without a calibration that fits."""
        calibration = self._valid_calibration()
        if calibration is None or calibration.flip != flip:
            return None
        decision, pairs = calibration.decision, listed.pairs
        scores = calibration.scores(embeddings, pairs)
        found = transfer(scores, pairs.same, decision.upper, decision.wanted_far)
        open_now = (scores >= decision.lower) & (scores < decision.upper)
        return {
            **transfer_values(found),
            "frr": float((scores[pairs.same] < decision.lower).double().mean()),
            "wanted_frr": decision.wanted_frr,
            "open": float(open_now.double().mean()),
            "list": calibration.data.get("list"),
            "same_pairs": all(calibration.data.get(key) == listed.about[key] for key in IDENTIFYING),
        }

    def export(self, path: Path, listed: PairList, embeddings: Tensor) -> None:
        """Writes names, people, features and norms of the images as .npz."""
        content = io.BytesIO()
        np.savez(
            content,
            names=np.array(listed.pairs.names),
            people=np.array([folder_of(name) for name in listed.pairs.names]),
            features=embeddings.cpu().numpy(),
            norms=norms_of(embeddings).float().numpy(),
            weights=np.array(self.weights),
        )
        write_atomically(path, content.getvalue())

    def _flip_note(self, flip: bool) -> str:
        """A sentence if only one of the run's calibration and this report uses mirror images."""
        calibration = self._valid_calibration()
        # Without a valid calibration there are no verdicts that could differ.
        if calibration is None or calibration.flip == flip:
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


def _scores(embeddings: Tensor, pairs: Pairs) -> Tensor:
    return pair_scores(embeddings, pairs.first, pairs.second).cpu()


def _rate_intervals(scores: Tensor, listed: PairList, decision: Decision) -> dict[str, Any]:
    """Intervals of the error rates at both thresholds, as an entry of the data; empty if people are unknown."""
    people, pairs = listed.people, listed.pairs
    if people is None:
        return {}
    bootstrap = PeopleBootstrap(scores, people[pairs.first], people[pairs.second])
    far, tar = bootstrap.at_threshold(decision.upper)[0], bootstrap.at_threshold(decision.lower)[1]
    if far is None or tar is None:
        return {}
    return {"intervals": {"far": list(far), "frr": [1 - tar[1], 1 - tar[0]], "how": str(bootstrap)}}


# From this cosine on, two images of different people are likely the same image.
TWIN = 0.9999


def _twin_note(scores: Tensor, pairs: Pairs) -> str:
    """A sentence if images of different people are nearly equal, as after a mistake in sorting."""
    twins = ((scores >= TWIN) & ~pairs.same).nonzero()[:, 0]
    if not len(twins):
        return ""
    one, other = (pairs.names[int(part[twins[0]])] for part in (pairs.first, pairs.second))
    more = f", and {len(twins) - 1:,} more" if len(twins) > 1 else ""
    return f"different people with nearly equal images: {one} and {other}{more}; check whether they are the same person"


def _other_pairs(report: Evaluation | None, about: dict[str, Any]) -> dict[str, Any] | None:
    """The pairs of an older report if they are other pairs than `about`, otherwise None."""
    before = None if report is None else report.get("data")
    if not isinstance(before, dict) or all(before.get(key, about[key]) == about[key] for key in IDENTIFYING):
        return None
    return before
