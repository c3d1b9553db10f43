"""What `dcnet attack` does: measures, keeps each measurement in the record, and tells."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcnet.cli.attack_options import exact_words
from dcnet.cli.run_options import WRONG_INPUT
from dcnet.escapes import visible

if TYPE_CHECKING:
    from dcnet.robustness.subject import Subject
    from dcnet.training import Run

INTERRUPTED = 130
PICTURES = ("accuracy", "loss")


@dataclass
class Attacked:
    """A run under attack, and what is to be said of it.

    Args:
        run: whose record keeps what is found.
        subject: its network, images and budget.
        about: dataset, network, device, and the fingerprints of weights and images, as plain values.
        source: name and weights of the run that attacks are transferred from; None without one.
        command: what was asked for, which also goes on after an interruption.
        report: the page to write, None for none.
    """

    run: Run
    subject: Subject
    about: dict[str, Any]
    source: dict[str, str] | None
    command: list[str]
    report: Path | None
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """What the record calls the card."""
        from dcnet.robustness.subject import STANDARD

        kind = "" if self.subject.effort == STANDARD else "-quick"
        return f"attack-{exact_words(self.subject.epsilon)}-{len(self.subject.images)}-images{kind}"

    @property
    def settings(self) -> dict[str, Any]:
        subject = self.subject
        own = {"epsilon": subject.epsilon, "norm": "linf", "images": len(subject.images), "seed": subject.seed}
        return own | dataclasses.asdict(subject.effort)

    def done(self) -> dict[str, Any]:
        """What the record has of the same card: the same weights, images and effort, and the same source."""
        kept = self.run.record().get("evaluations", {}).get(self.name, {})
        if not isinstance(kept, dict) or not isinstance(kept.get("results"), dict):
            return {}
        # A card of an older version does not say which images it was of.
        same = kept.get("pixels", self.about["pixels"]) == self.about["pixels"]
        if not same or kept.get("weights") != self.about["weights"] or kept.get("settings") != self.settings:
            return {}
        results: dict[str, Any] = dict(kept["results"])
        if self.source is not None and (results.get("transfer") or {}).get("source") != self.source:
            results.pop("transfer", None)
        return results

    def card(self, results: Mapping[str, Any]) -> dict[str, Any]:
        return {"run": self.run.folder.resolve().name, **self.about, "settings": self.settings, "results": results}

    def keep(self, values: Mapping[str, Any]) -> None:
        """Puts what is known into the record; a run that one may only read is attacked as well."""
        from dcnet.training import add_evaluation

        try:
            add_evaluation(self.run, self.name, {key: value for key, value in values.items() if key != "run"})
        except (OSError, ValueError) as error:
            self.notes = [f"note: the card is not kept in the record: {error}"]

    def again(self) -> str:
        return shlex.join(["dcnet", "attack", *self.command])


def attack(attacked: Attacked, as_json: bool) -> Callable[[], int]:
    """The work, with its exit code."""

    def work() -> int:
        try:
            card = _measured(attacked)
        except KeyboardInterrupt:
            kept = "what was measured is kept" if not attacked.notes else "nothing is kept"
            print(f"dcnet: interrupted; {kept}, go on with: {visible(attacked.again())}", file=sys.stderr)
            return INTERRUPTED
        except ValueError as error:
            # Of some networks it is known only now that they cannot be attacked.
            print(f"dcnet: {visible(error)}", file=sys.stderr)
            return WRONG_INPUT
        _tell(attacked, card, as_json)
        return 0

    return work


def _measured(attacked: Attacked) -> dict[str, Any]:
    from dcnet.cli.attack_progress import Progress
    from dcnet.robustness.checks import examined
    from dcnet.robustness.report_card import report_card
    from dcnet.robustness.verdict import verdict

    done = attacked.done()
    with Progress(done) as shown:

        def ends(name: str, results: dict[str, Any]) -> None:
            if name == "transfer" and attacked.source is not None:
                results[name]["source"] = attacked.source
            attacked.keep(attacked.card(results))
            shown.ends(name, results[name])

        results = report_card(attacked.subject, done, shown.begins, ends)
    checks = examined(results)
    told = verdict(results, checks, attacked.subject.epsilon, attacked.subject.effort)
    card = attacked.card(results) | {"checks": [dataclasses.asdict(check) for check in checks], "verdict": told}
    attacked.keep(card)
    return card


def _tell(attacked: Attacked, card: dict[str, Any], as_json: bool) -> None:
    from dcnet.report import robustness
    from dcnet.report.listing import console, print_json

    written = [] if attacked.report is None else _write(attacked, card, attacked.report)
    if as_json:
        print_json(card | {"written": [str(path) for path in written]})
        return
    name = visible(f"{card['run']}: {card['network']}")
    print(f"{name}; {card['settings']['images']:,} test images, on {card['device']}")
    for listing in (robustness.attacks, robustness.by_epsilon, robustness.corruptions, robustness.checks):
        console().print(listing(card))
    kept = f"kept in {attacked.run.record_file} as {attacked.name!r}"
    for line in (*card["verdict"]["words"], *(attacked.notes or [kept]), *(f"wrote {path}" for path in written)):
        print(visible(line))


def pictures_beside(report: Path) -> list[Path]:
    """The files of the pictures: that of the page, with what they show."""
    return [report.with_name(f"{report.stem}-{what}.png") for what in PICTURES]


def _write(attacked: Attacked, card: dict[str, Any], report: Path) -> list[Path]:
    from dcnet.files import write_atomically
    from dcnet.report import plots, robustness
    from dcnet.report.robustness_plots import accuracy_plot, loss_plot

    pictures = pictures_beside(report)
    for path, draw in zip(pictures, (accuracy_plot, loss_plot), strict=True):
        plots.save(draw(card), path)
    page = robustness.page(card, [path.name for path in pictures], attacked.again())
    write_atomically(report, page.encode())
    return [report, *pictures]
