"""Runs that a training goes on with, or starts from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dcnet.cli.convert_options import STATUS
from dcnet.cli.run_options import described

if TYPE_CHECKING:
    from dcnet.training import Run, RunConfig
    from dcnet.training.identity import Data


def begun(name: str, root: Path | None) -> tuple[RunConfig, Run]:
    """The config of a run that was begun, and its folder, whatever that is called by now."""
    from dcnet.training import config_of, find_run
    from dcnet.training.identity import check_has_builder

    run = find_run(name, root)
    record = run.record()
    if record["status"] == STATUS:
        raise ValueError(
            f"the run {name!r} was converted and never begun, so that it cannot go on: give it to --pretrained"
        )
    check_has_builder(record, run.folder.name)
    with described(run):
        return config_of(record["config"]), run


def run_of(config: RunConfig, dataset: Data, root: Path | None) -> tuple[RunConfig, Run]:
    """The config with the fingerprint of a user's folder, and its run.

    A run from before configs had fingerprints is taken for it if its record tells of the same images.
    """
    from dcnet.training import Run
    from dcnet.training.identity import described_data, same_data, with_data

    own, older = with_data(config, dataset), Run.of(config, root)
    run = Run.of(own, root)
    if not run.exists and older.exists and same_data(older.record()["data"], described_data(dataset)):
        return config, older
    return own, run


def weights_of(name: str, root: Path | None) -> str:
    """The folder of a run by its name, or what was given where it is a path."""
    from dcnet.training import all_runs, find_run

    if not name:
        # An empty variable of a shell would otherwise train from scratch.
        raise ValueError("--pretrained is '': give a finished run, or a file of weights of one")
    if Path(name).exists() or not any(_named(run, name) for run in all_runs(root)):
        return name
    return str(find_run(name, root).folder)


def _named(run: Run, name: str) -> bool:
    return run.folder.name.startswith(name) or run.folder.name.endswith(name)
