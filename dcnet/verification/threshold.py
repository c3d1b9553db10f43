"""Decisions with calibrated error rates: same, different, or too close to call; thresholds applied to other pairs."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dcnet.checks import Numbers, check_number
from dcnet.files import read_json, reason_of, write_json
from dcnet.verification.embeddings import pair_scores
from dcnet.verification.folds import fold_masks
from dcnet.verification.pairs import Pairs
from dcnet.verification.quality import QualityScore, norms_of, pair_quality
from dcnet.verification.roc_curve import Roc, check_rate, check_scores, in_double, roc

SAME, DIFFERENT, OPEN = "same", "different", "too close to call"


@dataclass(frozen=True)
class Verdict:
    """The verdict on a pair.

    Args:
        words: "same", "different" or "too close to call".
        score: the score of the pair.
        same: True, False, or None if it is too close to call.
        rate: the share of pairs of the other kind with the same verdict in calibration; None if too close to call.
    """

    words: str
    score: float
    same: bool | None
    rate: float | None

    def __str__(self) -> str:
        if self.rate is None:
            return f"{self.words} (score {self.score:.3f})"
        other = "impostor" if self.same else "genuine"
        return f"{self.words} (score {self.score:.3f}; wrong for {100 * self.rate:.3g} % of {other} pairs)"


@dataclass(frozen=True)
class Decision:
    """A decision rule for scores: same from `upper` on, different below `lower`, too close to call in between.

    Args:
        lower: the lower threshold.
        upper: the upper threshold; equal to `lower` if one threshold meets both rates.
        wanted_far: the largest share of impostor pairs that may be accepted.
        wanted_frr: the largest share of genuine pairs that may be rejected.
        far: the share of impostor pairs accepted in calibration.
        frr: the share of genuine pairs rejected in calibration.
        open_impostor: the share of impostor pairs too close to call.
        open_genuine: the share of genuine pairs too close to call.
        genuine: the number of genuine pairs in calibration.
        impostor: the number of impostor pairs.
        notes: a sentence for each rate with too few pairs.
    """

    lower: float
    upper: float
    wanted_far: float
    wanted_frr: float
    far: float
    frr: float
    open_impostor: float
    open_genuine: float
    genuine: int
    impostor: int
    notes: tuple[str, ...] = ()

    def decide(self, score: float) -> Verdict:
        """The verdict on a pair with that score."""
        score = float(score)
        if not math.isfinite(score):
            raise ValueError(f"a score must be a finite number, not {score}")
        if score >= self.upper:
            return Verdict(SAME, score, True, self.far)
        if score < self.lower:
            return Verdict(DIFFERENT, score, False, self.frr)
        return Verdict(OPEN, score, None, None)

    def thresholds(self) -> list[dict[str, Any]]:
        """Both thresholds, each with the error rates that it would have as the only threshold."""
        upper = {
            "verdict": "same from",
            "threshold": self.upper,
            "false_accepts": self.far,
            "false_rejects": self.frr + self.open_genuine,
        }
        lower = {
            "verdict": "different below",
            "threshold": self.lower,
            "false_accepts": self.far + self.open_impostor,
            "false_rejects": self.frr,
        }
        return [upper, lower]

    def to_json(self) -> dict[str, Any]:
        """The decision as plain values, for `from_json`."""
        return {**dataclasses.asdict(self), "notes": list(self.notes)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Decision":
        """A decision from the values of `to_json`."""
        names = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(values, dict) or set(values) != set(names):
            found = ", ".join(map(str, values)) if isinstance(values, dict) else type(values).__name__
            raise ValueError(f"a decision has the keys {', '.join(names)}, not {found}")
        _check_notes("notes of a decision", values["notes"])
        for name in names[:-1]:
            if type(values[name]) not in (int, float) or not math.isfinite(values[name]):
                raise ValueError(f"{name} of a decision must be a finite number, not {values[name]!r}")
        for name in ("wanted_far", "wanted_frr"):
            check_rate(f"{name} of a decision", values[name])
        if values["lower"] > values["upper"]:
            raise ValueError(
                f"lower of a decision must not be above upper, not {values['lower']} and {values['upper']}"
            )
        return cls(**{**values, "notes": tuple(values["notes"])})

    def save(self, path: Path | str) -> None:
        """Writes the decision as JSON."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: Path | str) -> "Decision":
        """Reads a file written by `save`."""
        try:
            return cls.from_json(read_json(path))
        except (OSError, ValueError) as error:
            raise ValueError(f"{str(path)!r} is not a decision: {reason_of(error)}") from None


def _check_notes(what: str, notes: Any) -> None:
    if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
        raise ValueError(f"{what} must be a list of sentences, not {notes!r}")


def calibrate(genuine: Numbers, impostor: Numbers, far: float = 1e-3, frr: float = 1e-2) -> Decision:
    """Thresholds that meet both error rates on the given pairs; see `calibrate_curve`.

    Args:
        genuine: scores of genuine pairs, [P].
        impostor: scores of impostor pairs, [Q].
        far: the share of impostor pairs that may be accepted.
        frr: the share of genuine pairs that may be rejected.
    """
    genuine, impostor = _scores("genuine", genuine), _scores("impostor", impostor)
    scores = torch.cat([genuine, impostor])
    return calibrate_curve(roc(scores, torch.arange(len(scores), device="cpu") < len(genuine)), far, frr)


def _scores(kind: str, given: Numbers) -> Tensor:
    scores = in_double(given)
    if scores.dim() != 1:
        raise ValueError(f"scores of {kind} pairs must be [P], not {list(scores.shape)}")
    return scores


def calibrate_curve(curve: Roc, far: float = 1e-3, frr: float = 1e-2) -> Decision:
    """The decision that meets both error rates and leaves as few pairs as possible too close to call.

    Thresholds are in the middle between two adjacent scores of the curve.

    Args:
        curve: the ROC curve of pairs that are not in the training set.
        far: the share of impostor pairs that may be accepted.
        frr: the share of genuine pairs that may be rejected.
    """
    check_rate("far", far)
    check_rate("frr", frr)
    upper, lower = curve.lowest(far), int((curve.frr <= frr).nonzero()[0])
    if lower <= upper:
        # One threshold meets both rates: take the gap between two scores that holds the middle of the range.
        middle = curve.at((float(curve.thresholds[upper + 1]) + float(curve.thresholds[lower])) / 2)
        # Rounded, the middle of adjacent floats is one of them.
        upper = lower = min(max(middle, lower), upper)
    return Decision(
        lower=curve.amid(lower),
        upper=curve.amid(upper),
        wanted_far=far,
        wanted_frr=frr,
        far=float(curve.far[upper]),
        frr=float(curve.frr[lower]),
        open_impostor=int(curve.impostor[lower] - curve.impostor[upper]) / curve.impostors,
        open_genuine=int(curve.genuine[lower] - curve.genuine[upper]) / curve.genuines,
        genuine=curve.genuines,
        impostor=curve.impostors,
        notes=_notes(curve, upper, lower, far, frr),
    )


def _notes(curve: Roc, upper: int, lower: int, far: float, frr: float) -> tuple[str, ...]:
    notes = [_too_few(curve.impostors, far, "impostor"), _too_few(curve.genuines, frr, "genuine")]
    if curve.genuine[upper] == 0:
        notes.append(f"no genuine pair is accepted at a false accept rate of at most {far:g}")
    if curve.impostor[lower] == curve.impostors:
        notes.append(f"no impostor pair is rejected at a false reject rate of at most {frr:g}")
    return tuple(note for note in notes if note)


def _too_few(count: int, rate: float, kind: str) -> str:
    """The rule of three: with no error in n pairs, the rate is below 3 / n with a confidence of 95 %."""
    needed = 3 / rate
    if count >= needed:
        return ""
    return (
        f"{count:,} {kind} pairs are too few to support a rate of {rate:g}: without an error it may still be "
        f"{min(3 / count, 1):.2g} (rule of three, 95 %); {math.ceil(needed):,} are needed"
    )


@dataclass(frozen=True)
class Transfer:
    """A threshold for a false accept rate from some pairs, applied to other pairs.

    Args:
        wanted_far: the false accept rate that the threshold was chosen for.
        threshold: the threshold; the mean of several, if each part of the pairs has its own.
        far: the share of the impostor pairs that is accepted.
        tar: the share of the genuine pairs that is accepted.
        own_tar: the true accept rate at `wanted_far` with a threshold from these pairs; None with too few pairs.
        genuine: the number of genuine pairs.
        impostor: the number of impostor pairs.
    """

    wanted_far: float
    threshold: float
    far: float
    tar: float
    own_tar: float | None
    genuine: int
    impostor: int

    @property
    def loss(self) -> float | None:
        """The true accept rate lost against a threshold from the pairs themselves; negative for a gain."""
        return None if self.own_tar is None else self.own_tar - self.tar


def transfer(scores: Numbers, same: Numbers, threshold: float, far: float) -> Transfer:
    """Applies a threshold that was chosen for a false accept rate on other pairs.

    Args:
        scores: scores of the pairs, [P].
        same: whether the pairs are genuine, [P].
        threshold: the threshold from other pairs.
        far: the false accept rate that it was chosen for.
    """
    check_number("threshold", threshold)
    curve = roc(scores, same)
    at, own = curve.at(threshold), curve.tar_at_far(far).tar
    found, tar = float(curve.far[at]), float(curve.tar[at])
    return Transfer(far, threshold, found, tar, own, curve.genuines, curve.impostors)


def fold_transfer(scores: Numbers, same: Numbers, folds: Numbers, far: float) -> Transfer | None:
    """Applies to each fold the threshold of the other folds; None if their impostor pairs are too few for the rate.

    With folds that share no person, this estimates how a threshold works for other people.

    Args:
        scores: scores of the pairs, [P].
        same: whether the pairs are genuine, [P].
        folds: the number of the fold of each pair, [P].
        far: the false accept rate that thresholds are chosen for.
    """
    check_rate("far", far)
    scores, same = check_scores(scores, same)
    thresholds, accepted = [], torch.zeros_like(same)
    for inside in fold_masks(folds, len(scores)):
        curve = roc(scores[~inside], same[~inside])
        if curve.tar_at_far(far).tar is None:
            return None
        thresholds.append(curve.amid(curve.lowest(far)))
        accepted |= inside & (scores >= thresholds[-1])
    found, tar = (float(accepted[kind].double().mean()) for kind in (~same, same))
    own = roc(scores, same).tar_at_far(far).tar
    mean = math.fsum(thresholds) / len(thresholds)
    return Transfer(far, mean, found, tar, own, int(same.sum()), int((~same).sum()))


KEYS = {"decision": dict, "data": dict, "weights": str, "flip": bool}


@dataclass(frozen=True)
class Calibration:
    """The decision rule of a network, and the pairs and weights that it was calibrated with.

    Args:
        decision: thresholds and their error rates.
        data: the pairs, described as plain values.
        weights: the fingerprint of the weights.
        flip: whether embeddings include the mirror image.
        quality: how scores are corrected for the norms of the features; None for the cosine alone.
    """

    decision: Decision
    data: dict[str, Any]
    weights: str
    flip: bool = True
    quality: QualityScore | None = None

    def scores(self, embeddings: Numbers, pairs: Pairs) -> Tensor:
        """The scores [P] of pairs of embeddings [N, D] that the thresholds apply to."""
        cosines = pair_scores(embeddings, pairs.first, pairs.second).cpu()
        if self.quality is None:
            return cosines
        return self.quality(cosines, pair_quality(norms_of(embeddings), pairs.first, pairs.second))

    def to_json(self) -> dict[str, Any]:
        """The calibration as plain values, for JSON."""
        values = {"decision": self.decision.to_json(), "data": self.data, "weights": self.weights, "flip": self.flip}
        return values if self.quality is None else {**values, "quality": vars(self.quality)}

    def save(self, path: Path | str) -> None:
        """Writes the calibration as JSON, atomically."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: Path | str) -> "Calibration":
        """Reads a file written by `save`."""
        try:
            values = read_json(path)
            wanted = KEYS | ({"quality": dict} if isinstance(values, dict) and "quality" in values else {})
            if not isinstance(values, dict) or {key: type(value) for key, value in values.items()} != wanted:
                expected = ", ".join(f"{key} ({kind.__name__})" for key, kind in KEYS.items())
                raise ValueError(f"expected the entries {expected}, perhaps quality (dict), and no others")
            _check_notes("notes of its data", values["data"].get("notes", []))
            quality = QualityScore(**values["quality"]) if "quality" in values else None
            return cls(**{**values, "decision": Decision.from_json(values["decision"]), "quality": quality})
        except (OSError, TypeError, ValueError) as error:
            raise ValueError(f"{str(path)!r} is not a calibration: {reason_of(error)}") from None
