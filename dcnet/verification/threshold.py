"""A decision about a pair: the same, different, or too close to call, each with the error rate it was made for."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dcnet.arrays import Numbers
from dcnet.files import read_json, write_json
from dcnet.verification.curves import Roc, check_rate, in_double, roc

SAME, DIFFERENT, OPEN = "the same", "different", "too close to call"


@dataclass(frozen=True)
class Verdict:
    """What is said of a pair.

    Args:
        words: "the same", "different" or "too close to call".
        score: of the pair.
        same: True, False, or None where it is too close to call.
        rate: the share of pairs of the other kind that were told the same, wrongly, in calibration; None without an
            answer.
    """

    words: str
    score: float
    same: bool | None
    rate: float | None

    def __str__(self) -> str:
        if self.rate is None:
            return f"{self.words} (score {self.score:.3f})"
        other = "impostor" if self.same else "genuine"
        return f"{self.words} (score {self.score:.3f}; so were {100 * self.rate:.3g} % of {other} pairs)"


@dataclass(frozen=True)
class Decision:
    """Same from `upper` on, different below `lower`, too close to call between.

    Args:
        lower: where it begins to be too close to call.
        upper: where it ends; the same as `lower` where one threshold holds both rates.
        wanted_far: the share of impostor pairs that may be called the same.
        wanted_frr: the share of genuine pairs that may be called different.
        far: the share of impostor pairs that were called the same in calibration.
        frr: the share of genuine pairs that were called different.
        open_impostor: the share of impostor pairs that were too close to call.
        open_genuine: the share of genuine pairs that were.
        genuine: how many genuine pairs there were.
        impostor: how many impostor pairs there were.
        notes: sentences on what the pairs are too few for.
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
        """What is said of a pair with that score."""
        score = float(score)
        if not math.isfinite(score):
            raise ValueError(f"a score must be a finite number, not {score}")
        if score >= self.upper:
            return Verdict(SAME, score, True, self.far)
        if score < self.lower:
            return Verdict(DIFFERENT, score, False, self.frr)
        return Verdict(OPEN, score, None, None)

    def to_json(self) -> dict[str, Any]:
        """Plain values, from which `from_json` makes the same again."""
        return {**dataclasses.asdict(self), "notes": list(self.notes)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Decision":
        """The decision of such values; others are an error."""
        names = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(values, dict) or set(values) != set(names):
            raise ValueError(f"a decision has the keys {', '.join(names)}, not {_keys(values)}")
        notes = values["notes"]
        if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
            raise ValueError(f"notes of a decision must be a list of sentences, not {notes!r}")
        for name in names[:-1]:
            if type(values[name]) not in (int, float) or not math.isfinite(values[name]):
                raise ValueError(f"{name} of a decision must be a finite number, not {values[name]!r}")
        if values["lower"] > values["upper"]:
            found = f"{values['lower']} and {values['upper']}"
            raise ValueError(f"lower of a decision must not be above upper, not {found}")
        return cls(**{**values, "notes": tuple(notes)})

    def save(self, path: Path | str) -> None:
        """Writes it as JSON, for instance beside a run."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: Path | str) -> "Decision":
        """Reads what `save` wrote."""
        try:
            return cls.from_json(read_json(path))
        except (OSError, ValueError) as error:
            raise ValueError(f"{str(path)!r} is not a decision: {error}") from None


def _keys(values: Any) -> str:
    return ", ".join(map(str, values)) if isinstance(values, dict) else type(values).__name__


def calibrate(genuine: Numbers, impostor: Numbers, far: float = 1e-3, frr: float = 1e-2) -> Decision:
    """Thresholds that keep both error rates on the given pairs; see `calibrate_curve`.

    Args:
        genuine: scores [P] of pairs that show the same.
        impostor: scores [Q] of pairs that do not.
        far: the share of impostor pairs that may be called the same.
        frr: the share of genuine pairs that may be called different.
    """
    genuine, impostor = _scores("genuine", genuine), _scores("impostor", impostor)
    same = torch.cat([torch.ones(len(genuine), device="cpu"), torch.zeros(len(impostor), device="cpu")]).bool()
    return calibrate_curve(roc(torch.cat([genuine, impostor]), same), far, frr)


def _scores(kind: str, given: Numbers) -> Tensor:
    scores = in_double(given)
    if scores.dim() != 1:
        raise ValueError(f"scores of {kind} pairs must be [P], not {list(scores.shape)}")
    return scores


def calibrate_curve(curve: Roc, far: float = 1e-3, frr: float = 1e-2) -> Decision:
    """The decision with as little as possible that is too close to call.

    Args:
        curve: of pairs that nobody was trained on.
        far: the share of impostor pairs that may be called the same.
        frr: the share of genuine pairs that may be called different.

    Thresholds lie in the middle between two neighbouring scores of the curve, where it has one on each side.
    """
    check_rate("far", far)
    check_rate("frr", frr)
    upper, lower = curve.lowest(far), int((curve.frr <= frr).nonzero()[0])
    highest, lowest = float(curve.thresholds[upper]), float(curve.thresholds[lower])
    if lowest >= highest:
        # Every threshold up to there and above the next score holds both rates: take the middle, and none is open.
        highest = lowest = curve.amid(upper, above=lowest)
        upper = lower = int((curve.thresholds >= highest).sum()) - 1
    else:
        highest, lowest = curve.amid(upper), curve.amid(lower)
    return Decision(
        lower=lowest,
        upper=highest,
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
        notes.append(f"no genuine pair is called the same where at most {far:g} of the impostor pairs may be")
    if curve.impostor[lower] == curve.impostors:
        notes.append(f"no impostor pair is called different where at most {frr:g} of the genuine pairs may be")
    return tuple(note for note in notes if note)


def _too_few(count: int, rate: float, kind: str) -> str:
    """The rule of three: after none in n, the rate is below 3 / n with a confidence of 95 %."""
    needed = 3 / rate
    if count >= needed:
        return ""
    # Beyond that nobody counts, and of the smallest rates it is infinite.
    pairs = f"{math.ceil(needed):,}" if needed < 1e15 else f"{needed:.0e}"
    return (
        f"{count:,} {kind} pairs are too few to support a rate of {rate:g}: with no error among them it may still be "
        f"{min(3 / count, 1):.2g} (rule of three, 95 %), and {pairs} would be needed"
    )
