"""What `dcnet verify` does: answer, calibrate, or report."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcnet.cli.kept_reports import keep
from dcnet.cli.run_options import WRONG_INPUT
from dcnet.escapes import visible

if TYPE_CHECKING:
    from dcnet.cli.embedding import Comparer
    from dcnet.cli.pair_options import Listed
    from dcnet.report.listing import Listing
    from dcnet.verification import Calibration
    from dcnet.verification.measures import Folds

FILE = "verification.json"


@dataclass(frozen=True)
class Told:
    """What comes out: all values for JSON, and for people a sentence, a table and lines."""

    values: dict[str, Any]
    head: str
    table: Listing
    lines: Sequence[str]

    def show(self, as_json: bool) -> None:
        from dcnet.report.listing import console, print_json

        if as_json:
            print_json(self.values)
            return
        print(visible(self.head))
        console().print(self.table)
        for line in self.lines:
            print(visible(line))


def shown(find: Callable[[], Told], as_json: bool) -> Callable[[], int]:
    """The work, with its exit code: whether images can be read and compared is known only when they are."""

    def work() -> int:
        try:
            told = find()
        except ValueError as error:
            print(f"dcnet: {visible(error)}", file=sys.stderr)
            return WRONG_INPUT
        told.show(as_json)
        return 0

    return work


def answer(comparer: Comparer, files: Sequence[Path], calibration: Calibration) -> Told:
    """What the run says of two images."""
    import torch

    from dcnet.report.verification import VERDICTS, rates, thresholds

    pair = torch.tensor([0]), torch.tensor([1])
    verdict = calibration.decision.decide(float(comparer.scores(files, *pair, calibration.flip)))
    values = {
        "run": comparer.name,
        "images": [str(file) for file in files],
        "verdict": VERDICTS[verdict.same],
        "same": verdict.same,
        "score": verdict.score,
        "thresholds": rates(calibration.decision),
        "calibration": calibration.to_json(),
    }
    head = f"{VERDICTS[verdict.same]}: the cosine is {verdict.score:.3f}"
    return Told(values, head, thresholds(calibration.decision), _lines(calibration))


def calibrate(comparer: Comparer, listed: Listed, path: Path, wanted: tuple[float, float], flip: bool) -> Told:
    """Thresholds that hold the rates of false accepts and false rejects on the pairs, written into a file."""
    from dcnet.report.verification import rates, thresholds
    from dcnet.verification import Calibration, calibrate_curve, roc

    # Before it takes a while, in which a training may replace them.
    weights = comparer.weights
    curve = roc(comparer.scores(listed.paths, listed.pairs.first, listed.pairs.second, flip), listed.pairs.same)
    calibration = Calibration(calibrate_curve(curve, *wanted), listed.about, weights, flip)
    calibration.save(path)
    about = {"run": comparer.name, "file": str(path), "thresholds": rates(calibration.decision)}
    head = f"{comparer.name}: {_pairs_in_words(listed)}"
    return Told(
        about | calibration.to_json(), head, thresholds(calibration.decision), [*_lines(calibration), f"wrote {path}"]
    )


def report(comparer: Comparer, listed: Listed, folds: Folds, path: Path, flip: bool) -> Told:
    """How well the run tells the pairs apart, with a picture."""
    from dcnet.report import plots
    from dcnet.report.roc_plot import roc_plot
    from dcnet.report.verification import measures
    from dcnet.verification import pair_scores, roc
    from dcnet.verification.measures import measured, retrieval_measures

    pairs = listed.pairs
    embeddings = comparer.embeddings(listed.paths, flip)
    scores = pair_scores(embeddings, pairs.first, pairs.second).cpu()
    curve = roc(scores, pairs.same)
    found = measured(scores, pairs.same, folds.numbers, curve)
    found["retrieval"] = retrieval_measures(embeddings, pairs)
    plots.save(roc_plot(_title(comparer, listed), curve, scores, pairs.same, found), path)
    notes = {"fold_note": folds.note, "flip_note": _flip_note(comparer, flip)}
    values = {"run": comparer.name, "data": listed.about, "flip": flip, **found, **notes}
    # The table says of which rates there are too few pairs; one sentence says why.
    too_few = [at["note"] for at in found["tar_at_far"] if at["note"]][:1]
    kept = keep(comparer, listed, values)
    lines = [*_noted([*listed.about["notes"], *notes.values(), *too_few]), kept.line, f"wrote {path}"]
    head = f"{comparer.name}: {_pairs_in_words(listed)}"
    return Told(values | {"plot": str(path)} | kept.values, head, measures(found), lines)


def _flip_note(comparer: Comparer, flip: bool) -> str:
    """A sentence where the report compares otherwise than the answers that the run gives by its calibration."""
    if not (comparer.run.folder / FILE).exists():
        return ""
    try:
        calibration = calibration_of(comparer)
    except ValueError:
        # It gives no answers, and a report needs none.
        return ""
    if calibration.flip == flip:
        return ""
    if flip:
        return "the run is calibrated without mirror images, and this report has them: see --no-flip"
    return "the run is calibrated with mirror images, and this report leaves them out: omit --no-flip"


def calibration_of(comparer: Comparer) -> Calibration:
    """That which the weights of the run have; none, or one of other weights, is an error that says what to do."""
    from dcnet.verification import Calibration

    how = f"`dcnet verify {comparer.run.folder} --calibrate --pairs FILE --images FOLDER`"
    path = comparer.run.folder / FILE
    if not path.exists():
        raise ValueError(
            f"the run {comparer.name!r} is not calibrated, so that no score can be called same or different: use {how}"
        )
    calibration = Calibration.load(path)
    if calibration.weights != comparer.weights:
        raise ValueError(f"the run {comparer.name!r} has other weights than when it was calibrated: use {how} again")
    return calibration


def _lines(calibration: Calibration) -> list[str]:
    from dcnet.report.verification import source

    return [source(calibration), *_noted([*calibration.data.get("notes", []), *calibration.decision.notes])]


def _noted(notes: Sequence[str]) -> list[str]:
    return [f"note: {note}" for note in notes if note]


def _pairs_in_words(listed: Listed) -> str:
    about = listed.about
    kinds = f"{about['pairs']:,} pairs, {about['same']:,} same and {about['different']:,} different, of {about['list']}"
    return kinds + (f", without {about['left_out']:,} that show a class of training" if about["left_out"] else "")


def _title(comparer: Comparer, listed: Listed) -> str:
    """What the picture is of, in lines that fit it."""
    config = comparer.record["config"]
    network = [str(config[name]) for name in ("dataset", "model", "operator", "margin") if config.get(name)]
    source = f"pairs: {Path(listed.about['list']).name}"
    return "\n".join(textwrap.fill(line, 100) for line in (", ".join(network), source))
