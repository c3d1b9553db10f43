"""Draw operators, margins, and the curves, features, filters and radii of runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

import dcnet
from dcnet import data, report, training
from dcnet.cli import options
from dcnet.files import write_atomically
from dcnet.terminal import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dcnet.report.features import Features
    from dcnet.training import Record, Run

AllSpecs = Annotated[tuple[str, ...], options.arg("SPEC ...", "all")]
Picture = Annotated[Path, tyro.conf.arg(metavar="FILE")]


@dataclass(frozen=True, kw_only=True)
class OutOption:
    """The output file of a plot."""

    out: Annotated[Path | None, options.arg("FILE", "in the folder of the run")] = None
    """The picture, .png or .svg."""


def _save(path: Path, draw: Callable[[], Figure]) -> Callable[[], int]:
    """Checks the path; returns a function that draws the figure and writes it."""
    options.output_file("--out", path)

    def work() -> int:
        report.drawing.save(draw(), path)
        print(f"wrote {visible(path)}")
        return 0

    return work


def _title(record: Record) -> str:
    return ", ".join(str(record.config[name]) for name in ("dataset", "model", "operator"))


@dataclass(frozen=True, kw_only=True)
class Operators:
    """Draw operators: the output as a function of the patch norm, and of the angle between patch and filter."""

    operators: AllSpecs = ()
    """Operators such as tanh-cos, "seg(slope=0.2)-sqcos+linear" or conv; by default, all magnitudes and angles."""

    out: Picture = Path("operators.png")
    """The picture, .png or .svg."""

    def prepare(self) -> Callable[[], int]:
        specs = list(dict.fromkeys(options.one_operator(spec) for spec in self.operators))
        return _save(self.out, lambda: report.operator_plots.operator_curves(specs))


@dataclass(frozen=True, kw_only=True)
class Margins:
    """Draw margins: the logit of the label as a function of the angle, annealing, and the size of the gradient."""

    margins: AllSpecs = ()
    """Margins such as a-softmax or "arcface(m=0.3)", see `dcnet list margins`."""

    m: Annotated[float, tyro.conf.arg(metavar="NUMBER")] = 4.0
    """The m of A-softmax in the plot of annealing."""

    out: Picture = Path("margins.png")
    """The picture, .png or .svg."""

    def prepare(self) -> Callable[[], int]:
        dcnet.losses.ASoftmax(m=self.m)
        specs = list(dict.fromkeys(str(dcnet.losses.as_margin(spec)) for spec in self.margins))
        return _save(self.out, lambda: report.operator_plots.margin_curves(specs, self.m))


@dataclass(frozen=True, kw_only=True)
class Curves(options.RunsOptions):
    """Draw test error, training loss and learning rate of runs by epoch.

    Runs that differ only in the seed are drawn as their mean, with a band from the smallest to the largest value.
    Dotted lines mark drops of the learning rate.
    """

    names: options.RunNames
    """Runs: their folders, their names, or unique prefixes or suffixes of names."""

    metric: Literal["error", "accuracy"] = "error"
    """The metric on the test set."""

    out: Annotated[Path | None, options.arg("FILE", "in the folder of the run, ./curves.png for several")] = None
    """The picture, .png or .svg."""

    def prepare(self) -> Callable[[], int]:
        runs = self.find_runs(self.names)
        # Draw before anything is written, since a record may be damaged.
        figure = self._figure([_record_with_curves(run) for run in runs])
        return _save(self.out or _default_path(runs, "curves.png"), lambda: figure)

    def _figure(self, records: list[Record]) -> Figure:
        try:
            return report.curves.run_curves(records, self.metric)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"the curves cannot be drawn, since a record is damaged: {error!r}") from None


def _record_with_curves(run: Run) -> Record:
    record = run.record()
    if not record.curves.step:
        raise ValueError(f"the run {run.folder.name!r} has no curves: its status is {record.status!r}")
    return record


def _default_path(runs: Sequence[Run | None], name: str) -> Path:
    """Returns the path of a file in the folder of a single run, or in the current folder for several."""
    return runs[0].folder / name if len(runs) == 1 and runs[0] is not None else Path(name)


@dataclass(frozen=True, kw_only=True)
class Filters(OutOption, options.OneRun):
    """Draw the filters of the first layer of a run as images, each scaled to its largest weight.

    Filters for gray images are drawn in gray, filters for color images in color.
    """

    layer: Annotated[str | None, options.arg("NAME", "the first")] = None
    """Draw another convolution, such as body.conv2.layer1.conv: a row per filter, with its channels in gray."""

    def prepare(self) -> Callable[[], int]:
        run = self.found()
        model, record = options.load_run(run)
        name, filters = report.network_plots.convolution(model, self.layer)
        path = self.out or run.folder / "filters.png"
        return _save(path, lambda: report.network_plots.filter_images(filters, f"{_title(record)}: {name}"))


@dataclass(frozen=True, kw_only=True)
class Radius(OutOption, options.OneRun):
    """Draw the learned radius rho of each decoupled layer of a run, and its initial value.

    Each box shows the quartiles over the channels of a layer; the first layer is at the top.
    """

    def prepare(self) -> Callable[[], int]:
        run = self.found()
        model, record = options.load_run(run)
        radii = report.network_plots.learned_radii(model)
        path = self.out or run.folder / "radius.png"
        return _save(path, lambda: report.network_plots.radius_boxes(radii, _title(record)))


@dataclass(frozen=True, kw_only=True)
class FeaturePlot(options.RunsOptions):
    """Draw the features of test images, and the directions of the class weights.

    The networks must have two features, or three, which are drawn on a sphere. For example:

    dcnet train --recipe features --margin a-softmax

    dcnet plot features mnist
    """

    names: options.RunNames
    """Runs: their folders, their names, unique prefixes or suffixes of names, or .json files that --records wrote."""

    animate: bool = False
    """Draw a GIF of the features during training; needs runs with --feature-snapshots, such as the recipe features."""

    records: options.OptionalFolder = None
    """Also write the features of each run to this folder as .json."""

    data_dir: options.DataFolder = None
    """The folder of the datasets."""

    out: Annotated[Path | None, options.arg("FILE", "in the folder of the run, ./features.png for several")] = None
    """The picture, .png or .svg, or .gif with --animate."""

    def prepare(self) -> Callable[[], int]:
        if self.animate and self.records is not None:
            raise ValueError("--animate and --records exclude each other: give one of them")
        return self._animation() if self.animate else self._picture()

    def _picture(self) -> Callable[[], int]:
        if not self.names:
            raise ValueError("give one or more runs; `dcnet list runs` shows them")
        found = [_drawn(name, self.root(), self.data_dir) for name in dict.fromkeys(self.names)]
        records = {} if self.records is None else _records_for(found, self.records)
        # Draw before anything is written, since the networks may have different classes.
        figure = report.feature_plots.feature_plots([one.features for one in found])
        draw = _save(self.out or _default_path([one.run for one in found], "features.png"), lambda: figure)

        def work() -> int:
            for path, record in records.items():
                report.features.write_features(path, record)
                print(f"wrote {visible(path)}")
            return draw()

        return work

    def _animation(self) -> Callable[[], int]:
        runs = self.find_runs(self.names)
        frames = [_snapshots(run) for run in runs]
        path = options.output_file("--out", self.out or _default_path(runs, "features.gif"), (".gif",))

        def work() -> int:
            write_atomically(path, report.feature_plots.feature_animation(frames))
            print(f"wrote {visible(path)}")
            return 0

        return work


@dataclass(frozen=True)
class _Drawn:
    """Features, with their run and its record if they were not read from a file."""

    features: Features
    run: Run | None = None
    record: Record | None = None


def _drawn(name: str, root: Path, data_dir: Path | None) -> _Drawn:
    path = Path(name)
    if path.suffix == ".json" and path.name != "record.json":
        return _Drawn(report.features.read_features(path))
    run = training.find_run(name, root)
    model, record = options.load_run(run)
    dataset = training.identity.load_run_data(record, data_dir)
    training.identity.check_classes(dataset, record)
    if isinstance(dataset, data.FolderDataset):
        raise ValueError(
            f"{run.folder.name} was trained on a folder of images, whose features cannot be drawn: give another run"
        )
    return _Drawn(report.features.features_of(model, record, dataset), run, record)


def _records_for(found: Sequence[_Drawn], folder: Path) -> dict[Path, dict[str, Any]]:
    """Returns the records of features by file; raises ValueError if two would have the same file."""
    owners: dict[Path, Path] = {}
    records = {}
    for one in found:
        if one.run is None or one.record is None:
            raise ValueError(f"--records needs runs, but {one.features.title} was read from a record: omit --records")
        run = one.run.folder.resolve()
        path = folder / f"{run.name}.json"
        if (other := owners.setdefault(path, run)) != run:
            both = f"{str(other)!r} and {str(run)!r}"
            raise ValueError(f"{both} would both be written to {str(path)!r}: draw them separately")
        records[path] = report.features.record_of(one.features, one.record)
    # Check this last, since it creates the folder.
    for path in records:
        options.writable(str(path))
    return records


def _snapshots(run: Run) -> list[Features]:
    """Returns the features of a run at each evaluation."""
    if not run.features_file.exists():
        status = run.record().status
        raise ValueError(
            f"the run {run.folder.name!r} has no snapshots of features (its status is {status!r}): train one with "
            "--feature-snapshots 1000, or with the recipe features"
        )
    with options.explain_record_errors(run):
        return report.features.frames_of(training.evaluation.read_history(run.features_file), run.record())


COMMANDS = {
    "curves": Curves,
    "features": FeaturePlot,
    "filters": Filters,
    "margins": Margins,
    "operators": Operators,
    "radius": Radius,
}
