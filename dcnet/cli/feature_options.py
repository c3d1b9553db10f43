"""What `dcnet plot features` draws: networks of runs, records of them, and what a run kept on its way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcnet.cli.run_options import described, loaded

if TYPE_CHECKING:
    from dcnet.report.features import Features
    from dcnet.training import Run


@dataclass(frozen=True)
class Drawn:
    """Features, and the run and the record that they are of unless they were read from a file."""

    features: Features
    run: Run | None = None
    record: dict[str, Any] | None = None

    @classmethod
    def of(cls, name: str, root: Path, data_dir: Path | None) -> Drawn:
        """Those of a file, or of the network of a run."""
        from dcnet.report.features import read_features
        from dcnet.training import find_run

        path = Path(name)
        if path.suffix == ".json" and path.name != "record.json":
            return cls(read_features(path))
        return cls._of_run(find_run(name, root), data_dir)

    @classmethod
    def _of_run(cls, run: Run, data_dir: Path | None) -> Drawn:
        from dcnet.data import FolderDataset
        from dcnet.report.evaluation import check_dataset
        from dcnet.report.features import features_of
        from dcnet.training.identity import data_of

        model, record = loaded(run)
        dataset = data_of(record, data_dir)
        check_dataset(dataset, record)
        if isinstance(dataset, FolderDataset):
            raise ValueError(f"{run.folder.name} was trained on a folder of images: only datasets in memory are drawn")
        return cls(features_of(model, record, dataset), run, record)


def records_for(found: Sequence[Drawn], folder: Path) -> dict[Path, dict[str, Any]]:
    """The records of what is drawn of runs, by the files that they go to."""
    from dcnet.report.features import record_of
    from dcnet.report.options import writable

    owners: dict[Path, Path] = {}
    records = {}
    for one in found:
        if one.run is None or one.record is None:
            raise ValueError(f"--records is of runs, and {one.features.title} was read from a record: omit --records")
        run = one.run.folder.resolve()
        path = folder / f"{run.name}.json"
        if (other := owners.setdefault(path, run)) != run:
            both = f"{str(other)!r} and {str(run)!r}"
            raise ValueError(f"{both} would both be written to {str(path)!r}: draw them apart, with two --records")
        records[path] = record_of(one.features, one.record)
    # Last, since it makes the folder.
    for path in records:
        writable(str(path))
    return records


def frames_of_run(run: Run) -> list[Features]:
    """The features that a run kept at its evaluations."""
    from dcnet.report.features import frames_of
    from dcnet.training.snapshots import read_history

    if not run.features_file.exists():
        status = run.record()["status"]
        raise ValueError(
            f"the run {run.folder.name!r}, whose status is {status!r}, has no features to animate: train one with "
            "--feature-snapshots 1000, which the recipe features has"
        )
    with described(run):
        return frames_of(read_history(run.features_file), run.record())
