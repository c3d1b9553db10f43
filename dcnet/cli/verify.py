"""`dcnet verify`."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.progress import track

from dcnet import report, training, verification
from dcnet.cli import options
from dcnet.terminal import console, print_json, visible

if TYPE_CHECKING:
    from torch import Tensor

    from dcnet.table import Table
    from dcnet.training import Run
    from dcnet.training.image_input import ImageInput
    from dcnet.verification import Calibration, Folds
    from dcnet.verification.pair_list import PairList
    from dcnet.verification.verify_run import RunVerifier, Stored

BATCH = 64
FAR, FRR = 1e-3, 1e-2
PAIRS = "--people, --pairs or --lfw"
FEATURES = (".npz",)


@dataclass(frozen=True, kw_only=True)
class PairOptions:
    """Labeled pairs: of a folder of people, of a list, or of LFW."""

    people: options.OptionalFolder = None
    """A folder with one folder of images per person or class: uses all pairs of its images."""

    pairs: options.OptionalFile = None
    """A list of pairs: each line has two paths, and 1 or same, or 0 or different."""

    images: Annotated[Path | None, options.arg("FOLDER", "the folder of the list")] = None
    """The folder that the paths in --pairs are relative to."""

    lfw: Annotated[
        Path | None, tyro.conf.arg(metavar="FOLDER", aliases=["--data-dir"], help_behavior_hint="(optional)")
    ] = None
    """Use pairs of LFW: a folder with Person/Person_0001.jpg, or one that contains such a folder, called
    lfw-deepfunneled, lfw_funneled or lfw. The lists are in it or next to it."""

    lfw_list: Annotated[str | None, options.arg("NAME", "pairs")] = None
    """The list of LFW: pairs, pairsDevTrain or pairsDevTest."""

    unseen: bool = False
    """Skip pairs with an image in a folder that has the name of a class of the run."""

    def check_pairs(self) -> None:
        """Raises ValueError for options that exclude or need each other."""
        sources = {"--people": self.people, "--pairs": self.pairs, "--lfw": self.lfw}
        given = [option for option, value in sources.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other: give one of them")
        for option, value, other, wanted in (
            ("--images", self.images, "--pairs", self.pairs),
            ("--lfw-list", self.lfw_list, "--lfw", self.lfw),
        ):
            if value is not None and wanted is None:
                raise ValueError(f"{option} needs {other}")
        if self.images is not None and not self.images.is_dir():
            raise ValueError(f"--images must be a folder with the images, not {str(self.images)!r}")

    @property
    def listed(self) -> bool:
        return any(source is not None for source in (self.people, self.pairs, self.lfw))

    def read(self, classes: Sequence[str]) -> PairList:
        """Reads the pairs, with a note if they show classes of the training set."""
        files = (self.pairs, self.images, self.lfw, self.lfw_list)
        return verification.pair_list.read_pair_list(classes, *files, self.unseen, self.people)


@dataclass(frozen=True, kw_only=True)
class Command(options.JsonOption, options.DeviceOption, PairOptions, options.OneRun):
    """Decide whether two images show the same class or person, which need not be in the training set.

    First calibrate: dcnet verify RUN --calibrate --people FOLDER sets the thresholds of a run on all pairs of a folder
    with one folder of images per person. Then dcnet verify RUN a.jpg b.jpg prints same, different, or too close to
    call. Without --calibrate, it reports measures on the pairs: accuracy over folds that share no person, AUC, EER,
    TAR@FAR with intervals, how well thresholds transfer, norms as quality, retrieval, and a plot of the ROC curve.

    Images are compared by the cosine of the features before the last layer, averaged with those of the mirror image.
    """

    files: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[IMAGE IMAGE]", help_behavior_hint="")
    ]
    """Two files such as .png or .jpg."""

    calibrate: bool = False
    """Set the thresholds of the run on the pairs, and store them next to its record."""

    far: Annotated[float | None, options.arg("RATE", str(FAR))] = None
    """For --calibrate: the share of different pairs that may be accepted as the same (false accept rate)."""

    frr: Annotated[float | None, options.arg("RATE", str(FRR))] = None
    """For --calibrate: the share of same pairs that may be rejected as different (false reject rate)."""

    by_norm: bool = False
    """For --calibrate: correct the cosines for the norms of the features, which may measure the quality of images."""

    no_flip: bool = False
    """For pairs: do not use mirror images, for example for digits. Stored with the calibration."""

    out: Annotated[Path | None, options.arg("FILE", "in the folder of the run")] = None
    """The plot of the ROC curve, .png or .svg."""

    export: options.OptionalFile = None
    """Write the features of all images with their names, people and norms to this file, .npz."""

    def prepare(self) -> Callable[[], int]:
        self._check()
        verifier = _verifier(self.found(), self.chosen_device())
        if self.files:
            calibration = verifier.calibration()
            return options.report_bad_input(lambda: _compare(verifier, self.files, calibration).print(self.json))
        find = self._with_pairs(verifier, self.read(verifier.record.data.classes))
        return options.report_bad_input(lambda: find().print(self.json))

    def _with_pairs(self, verifier: RunVerifier, listed: PairList) -> Callable[[], Output]:
        features = None if self.export is None else options.output_file("--export", self.export, FEATURES)
        if self.calibrate:
            options.writable(str(verifier.calibration_file))
            return lambda: _calibrate(verifier, listed, self, features)
        # Check the number of pairs before `output_file` creates the folder of the picture.
        folds = verification.Folds.by_people(listed.pairs, listed.people)
        picture = options.output_file("--out", self.out or verifier.run.folder / "roc.png")
        return lambda: _report(verifier, listed, folds, (picture, features), not self.no_flip)

    def _check(self) -> None:
        """Raises ValueError for options that exclude or need each other."""
        self.check_pairs()
        self._check_kind()
        for option, given, other, wanted in (
            ("--far", self.far is not None, "--calibrate", self.calibrate),
            ("--frr", self.frr is not None, "--calibrate", self.calibrate),
            ("--by-norm", self.by_norm, "--calibrate", self.calibrate),
            ("--unseen", self.unseen, PAIRS, self.listed),
            ("--no-flip", self.no_flip, PAIRS, self.listed),
            ("--export", self.export is not None, PAIRS, self.listed),
            ("--out", self.out is not None, f"a report on {PAIRS}", self.listed and not self.calibrate),
        ):
            if given and not wanted:
                raise ValueError(f"{option} is only for {other}")
        for option, rate in (("--far", self.far), ("--frr", self.frr)):
            if rate is not None:
                verification.check_rate(option, rate)

    def _check_kind(self) -> None:
        if self.calibrate and not self.listed:
            raise ValueError("--calibrate needs labeled pairs: give --people FOLDER, --pairs FILE or --lfw FOLDER")
        if bool(self.files) == self.listed:
            given = "both" if self.listed else "nothing"
            raise ValueError(f"give two images, or labeled pairs with {PAIRS}, not {given}")
        if self.files and len(self.files) != 2:
            advice = "for more, use a list with --pairs or a folder of people with --people"
            raise ValueError(f"give two images to compare, not {len(self.files)}; {advice}")


@dataclass(frozen=True)
class Output:
    """The output of the command: `values` as JSON, or a sentence, tables and lines for the terminal."""

    values: dict[str, Any]
    head: str
    tables: Sequence[Table]
    lines: Sequence[str]

    def print(self, as_json: bool) -> int:
        """Prints the output and returns the exit code."""
        if as_json:
            print_json(self.values)
            return 0
        print(visible(self.head))
        for table in self.tables:
            console().print(table)
        for line in self.lines:
            print(visible(line))
        return 0


def _verifier(run: Run, device: str) -> RunVerifier:
    model, record = options.load_run(run)
    reader = training.image_input.ImageInput.of(record)
    return verification.verify_run.RunVerifier(run, model, record, device, lambda paths: _batches(paths, reader))


def _batches(paths: Sequence[Path], reader: ImageInput) -> Iterator[Tensor]:
    """Yields batches of network inputs, with a progress bar on stderr."""
    errors = console(stderr=True)
    parts = [paths[start : start + BATCH] for start in range(0, len(paths), BATCH)]
    hidden = not errors.is_terminal or len(parts) == 1
    for part in track(parts, "reading images", console=errors, transient=True, disable=hidden):
        yield reader.read(part)


def _compare(verifier: RunVerifier, files: Sequence[Path], calibration: Calibration) -> Output:
    found = verifier.compare(files, calibration)
    verdict = found.verdict
    values = {
        "run": verifier.name,
        "images": [str(file) for file in files],
        "verdict": verdict.words,
        "same": verdict.same,
        "score": verdict.score,
        "cosine": found.cosine,
        "norms": list(found.norms),
        "thresholds": calibration.decision.thresholds(),
        "calibration": calibration.to_json(),
    }
    corrected = f", and {verdict.score:.3f} corrected for norms" if calibration.quality else ""
    head = f"{verdict.words}: the cosine is {found.cosine:.3f}{corrected}"
    return Output(values, head, [report.roc_plots.thresholds(calibration.decision)], _lines(calibration))


def _calibrate(verifier: RunVerifier, listed: PairList, given: Command, features: Path | None) -> Output:
    far, frr = FAR if given.far is None else given.far, FRR if given.frr is None else given.frr
    calibration, embeddings = verifier.calibrate(listed, far, frr, not given.no_flip, given.by_norm)
    path = verifier.calibration_file
    about = {"run": verifier.name, "file": str(path), "thresholds": calibration.decision.thresholds()}
    intervals = calibration.data.get("intervals")
    rates = [report.roc_plots.undecided(calibration.decision)]
    rates += [report.roc_plots.rate_intervals(intervals)] if intervals else []
    exported = _exported(verifier, listed, embeddings, features)
    lines = [*rates, *_lines(calibration), *exported, f"wrote {path}"]
    table = report.roc_plots.thresholds(calibration.decision)
    return Output(about | calibration.to_json(), f"{verifier.name}: {listed}", [table], lines)


def _report(
    verifier: RunVerifier, listed: PairList, folds: Folds, files: tuple[Path, Path | None], flip: bool
) -> Output:
    (path, features), found = files, verifier.report(listed, folds, flip)
    title = _title(verifier.record.config, listed)
    plot = report.roc_plots.roc_plot(title, found.curve, found.scores, listed.pairs.same, found.values)
    report.drawing.save(plot, path)
    stored = verifier.store(found.values)
    exported = _exported(verifier, listed, found.embeddings, features)
    lines = [*_notes(found.notes), *exported, _stored_line(verifier, stored), f"wrote {path}"]
    replaced = {} if stored.replaced is None else {"replaced": stored.replaced}
    values = found.values | {"plot": str(path)} | replaced
    tables = [
        make(found.values) for make in (report.roc_plots.measures, report.roc_plots.transfers, report.roc_plots.norms)
    ]
    return Output(values, f"{verifier.name}: {listed}", [table for table in tables if table.rows], lines)


def _exported(verifier: RunVerifier, listed: PairList, embeddings: Tensor, path: Path | None) -> list[str]:
    """Writes the features if asked to; returns the line that says so."""
    if path is None:
        return []
    verifier.export(path, listed, embeddings)
    return [f"wrote {path}"]


def _stored_line(verifier: RunVerifier, stored: Stored) -> str:
    if stored.error:
        return f"note: the report is not stored in the record: {stored.error}"
    line, before = f"stored in {verifier.run.record_file} as {stored.name!r}", stored.replaced
    if before is None:
        return line
    other = f"{before.get('pairs')} other pairs, of {before.get('list_file', before.get('list'))}"
    return f"{line}; it replaces a report on {other}"


def _lines(calibration: Calibration) -> list[str]:
    source = report.roc_plots.source(calibration)
    return [source, *_notes([*calibration.data.get("notes", []), *calibration.decision.notes])]


def _notes(notes: Sequence[str]) -> list[str]:
    return [f"note: {note}" for note in notes]


def _title(config: dict[str, Any], listed: PairList) -> str:
    """Returns the title of the plot, wrapped to its width."""
    network = [str(config[name]) for name in ("dataset", "model", "operator", "margin") if config.get(name)]
    source = f"pairs: {Path(listed.about['list']).name}"
    return "\n".join(textwrap.fill(line, 100) for line in (", ".join(network), source))
