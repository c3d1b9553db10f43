"""What was measured of a trained network, in words, and the command that measured it."""

import dataclasses
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dcnet.experiments import Experiment
from dcnet.report.page.curves_in import Curve
from dcnet.report.page.origin import Record
from dcnet.robustness.checks import words_for
from dcnet.robustness.subject import QUICK, STANDARD

# What `dcnet attack` does without an option.
IMAGES, EPSILON = 1000, "8/255"
WEAKER = "A quick card: its attacks were weaker than the standard ones, for a first look and not for a report."
# What `dcnet reproduce` measures for Tables 7 and 8.
TITLES: dict[tuple[str, ...], str] = {
    ("attacks", "by_epsilon"): "FGSM by epsilon",
    ("attacks", "by_steps"): "BIM by steps",
}
UNKNOWN = "the record does not say which command measured it"


@dataclass(frozen=True)
class Measurement:
    """An evaluation of a run, by its name in the record, and a curve in it."""

    record: Record
    name: str
    values: Mapping[str, Any]
    curve: Curve

    @property
    def settings(self) -> Mapping[str, Any]:
        """Those of a card of `dcnet attack`; nothing for any other evaluation."""
        found = self.values.get("settings")
        return found if isinstance(found, Mapping) and {"epsilon", "images"} <= found.keys() else {}

    @property
    def title(self) -> str:
        """What was done to the images."""
        where = self.curve.where
        if self.settings and "by_epsilon" in where:
            return "PGD by epsilon"
        if self.settings and "corrupted" in where:
            return f"corrupted by {where[-1].replace('_', ' ')}"
        return TITLES.get(where) or self.curve.name

    @property
    def about(self) -> str:
        """On which images, how hard, and what to think of it."""
        images = self.settings.get("images", self.values.get("images"))
        on = f"On {images:,} test images that were changed" if isinstance(images, int) else "On changed test images"
        steps = self.settings.get("steps") if "by_epsilon" in self.curve.where else None
        how = f", by {steps} steps at each epsilon" if steps else ""
        within = self.values.get("epsilon") if self.curve.axis == "steps" else None
        budget = f", within {words_for(within)} of each pixel" if isinstance(within, float) else ""
        return f"{on}{how}{budget}; {self.name!r} in the records." + (f" {WEAKER}" if self.weaker else "")

    @property
    def weaker(self) -> bool:
        """Whether it is of attacks that were weaker than the standard ones; corruptions are the same on any card."""
        attacked = bool(self.settings) and "corrupted" not in self.curve.where
        return attacked and self._effort() != dataclasses.asdict(STANDARD)

    def command(self, experiments: Iterable[Experiment]) -> str:
        """The one that the record holds; else that of the card, or of the experiments that want this evaluation."""
        if isinstance(self.values.get("command"), str):
            return str(self.values["command"])
        if self.settings:
            return self._attack()
        wanted = [one.name for one in experiments if any(cell.evaluation == self.name for cell in one.cells)]
        return shlex.join(["dcnet", "reproduce", *wanted]) if wanted else UNKNOWN

    def _attack(self) -> str:
        """`dcnet attack` with what is not as by default, as far as the card tells."""
        words = ["dcnet", "attack", f"{self.record['name']}-{self.record['hash']}"]
        if self.settings["images"] != IMAGES:
            words += ["--images", str(self.settings["images"])]
        if (epsilon := _spelled(self.settings["epsilon"])) != EPSILON:
            words += ["--epsilon", epsilon]
        source = ((self.values.get("results") or {}).get("transfer") or {}).get("source") or {}
        words += ["--source", str(source["run"])] if source.get("run") else []
        return shlex.join([*words, *(["--quick"] if self._effort() == dataclasses.asdict(QUICK) else [])])

    def _effort(self) -> dict[str, Any]:
        return {field.name: self.settings.get(field.name) for field in dataclasses.fields(STANDARD)}


def _spelled(epsilon: float) -> str:
    """An epsilon as an option has it, with all its digits: as a fraction only where it is one."""
    return words_for(epsilon) if abs(255 * epsilon - round(255 * epsilon)) < 1e-6 else repr(epsilon)
