"""A decision that is kept beside the network it was made for, with the pairs that it comes from."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcnet.files import read_json, write_json
from dcnet.verification.threshold import Decision

KEYS = {"decision": dict, "data": dict, "weights": str, "flip": bool}


@dataclass(frozen=True)
class Calibration:
    """What a network says of a pair, and why.

    Args:
        decision: thresholds, and the error rates at them.
        data: which pairs it is from, and how many, as plain values.
        weights: the fingerprint of the weights that the scores are from; others have other scores.
        flip: whether embeddings are those of an image and its mirror image.
    """

    decision: Decision
    data: dict[str, Any]
    weights: str
    flip: bool = True

    def to_json(self) -> dict[str, Any]:
        """Plain values, as they are saved."""
        return {"decision": self.decision.to_json(), "data": self.data, "weights": self.weights, "flip": self.flip}

    def save(self, path: Path | str) -> None:
        """Writes it as JSON, whole or not at all."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: Path | str) -> "Calibration":
        """Reads what `save` wrote."""
        try:
            values = read_json(path)
            if not isinstance(values, dict) or {key: type(value) for key, value in values.items()} != KEYS:
                raise ValueError(f"expected {', '.join(KEYS)}, and nothing else")
            notes = values["data"].get("notes", [])
            if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
                raise ValueError(f"notes of its data must be a list of sentences, not {notes!r}")
            return cls(**{**values, "decision": Decision.from_json(values["decision"])})
        except (OSError, ValueError) as error:
            raise ValueError(f"{str(path)!r} is not a calibration: {error}") from None


def fingerprint(file: Path | str) -> str:
    """The SHA-256 of a file of weights."""
    with Path(file).open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
