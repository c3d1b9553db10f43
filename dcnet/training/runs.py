"""Runs on disk: a folder each, with one record, the weights, and checkpoints on the way."""

import os
import shlex
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from dcnet.files import expanded, read_json, write_json
from dcnet.training.build import build_model, check_size
from dcnet.training.checkpoints import Checkpoints, read_tensors
from dcnet.training.config import RunConfig, config_of
from dcnet.training.identity import Data, check_has_builder, with_data, with_network
from dcnet.training.record_checks import problem_of
from dcnet.training.state import load_weights_

ROOT = Path("runs")
# Runs that are named where a name may be that of many.
SOME = 4
# What a record may have beside its config and curves, each by names.
PARTS = ("data", "environment", "evaluations", "results", "timings")
# A config of defaults alone would be that of another network.
DESCRIBED = ("dataset", "model", "operator")
Record = dict[str, Any]


def runs_root() -> Path:
    """Where runs go: DCNET_RUNS, or `runs` in the folder where one is."""
    given = os.environ.get("DCNET_RUNS")
    return expanded(given) if given else ROOT


@dataclass(frozen=True)
class Run:
    """The folder of one run."""

    folder: Path

    @classmethod
    def of(
        cls,
        config: RunConfig,
        root: Path | None = None,
        model: nn.Module | None = None,
        dataset: Data | None = None,
        model_name: str | None = None,
    ) -> "Run":
        """The run of a config in the folder of runs, `runs` by default.

        Args:
            config: what is trained.
            root: the folder of runs.
            model: a custom network that the `Trainer` is given, which has a run of its own.
            dataset: a custom dataset, likewise.
            model_name: what to call the network; None for its class.
        """
        own = identified(config, model, dataset, model_name)
        return cls((root or runs_root()) / f"{own.name}-{own.hash}")

    @property
    def record_file(self) -> Path:
        return self.folder / "record.json"

    @property
    def model_file(self) -> Path:
        return self.folder / "model.safetensors"

    @property
    def features_file(self) -> Path:
        """Features of test images at each evaluation, where the run was to keep them."""
        return self.folder / "features.safetensors"

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.folder / "checkpoints")

    @property
    def exists(self) -> bool:
        return self.record_file.exists()

    def record(self) -> Record:
        """The record; a ValueError in one sentence where there is none, or none that can be read."""
        return read_record(self.record_file)

    def record_if_any(self) -> Record | None:
        """The record, or None where there is none that can be read."""
        try:
            return self.record()
        except ValueError:
            return None

    def write(self, record: Record) -> None:
        write_json(self.record_file, record)

    def empty(self) -> None:
        """Removes whatever is in the folder, but for the lock of who is working on it.

        The record goes first: without it nobody takes the rest for a run that is done.
        """
        self.record_file.unlink(missing_ok=True)
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != ".lock":
                path.unlink()

    def remove_leftovers(self) -> None:
        """Removes the temporary files of writes that were interrupted."""
        for path in self.folder.glob(".*.tmp"):
            path.unlink(missing_ok=True)
        self.checkpoints.remove_leftovers()

    def put_away(self) -> None:
        """Removes what is left of the training of a run that is done, and was killed before it had cleared all."""
        # Without the weights the checkpoints are all there is.
        if self.model_file.exists():
            with suppress(OSError):
                self.remove_leftovers()
                self.checkpoints.clear()

    @property
    def done(self) -> bool:
        return self.exists and self.record()["status"] == "done"


def identified(
    config: RunConfig, model: nn.Module | None = None, dataset: Data | None = None, model_name: str | None = None
) -> RunConfig:
    """The config, with the identity of a custom network and of a dataset that is given."""
    of_data = config if dataset is None else with_data(config, dataset)
    return of_data if model is None else with_network(of_data, model, model_name)


def read_record(path: Path) -> Record:
    """The record in a file, or in the folder of a run."""
    file = path / "record.json" if path.is_dir() else path
    try:
        record = read_json(file)
    except FileNotFoundError:
        raise ValueError(f"there is no record at {str(file)!r}: give a run, see `dcnet list runs`") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{str(file)!r} is not a record of a run: {reason}") from None
    if problem := record_problem(record):
        raise ValueError(f"{str(file)!r} is not a record of a run: {problem}")
    return record


def record_problem(record: Any) -> str | None:
    """What is wrong with a value of JSON as the record of a run; None for nothing."""
    whole = isinstance(record, dict) and all(isinstance(record.get(name), dict) for name in ("config", "curves"))
    if not whole or "status" not in record:
        return "it lacks config, status or curves"
    for name in PARTS:
        # Of a run that is not at its end there are no results.
        if not isinstance(record.get(name, {}), dict) and (name, record[name]) != ("results", None):
            return f"{name!r} in it is {record[name]!r}"
    return problem_of(record)


def find_run(text: str, root: Path | None = None) -> Run:
    """The run of a folder, a record, a name or the only beginning of one among the runs."""
    if not text:
        # An empty variable of a shell would otherwise be the beginning of every name.
        raise ValueError("the name of the run is '': see `dcnet list runs`")
    path, root = Path(text), root or runs_root()
    if path.name == "record.json" and path.exists():
        return Run(path.parent)
    if (path / "record.json").exists():
        return Run(path)
    known = all_runs(root)
    matching = (
        [run for run in known if run.folder.name == text]
        or [run for run in known if run.folder.name.startswith(text)]
        or [run for run in known if run.folder.name.endswith(text)]
    )
    if len(matching) == 1:
        return matching[0]
    if matching:
        names = ", ".join(run.folder.name for run in matching[:SOME])
        more = ", ..." if len(matching) > SOME else ""
        raise ValueError(f"{text!r} may be any of {len(matching)} runs: {names}{more}")
    raise ValueError(f"there is no run {text!r}, neither as a folder nor in {str(root)!r}: see `dcnet list runs`")


def all_runs(root: Path | None = None) -> list[Run]:
    """The runs in a folder, by name."""
    root = root or runs_root()
    return [Run(path.parent) for path in sorted(root.glob("*/record.json"))]


def load_model(run: Run, builder: Callable[[], nn.Module] | None = None) -> tuple[nn.Module, Record]:
    """The trained network of a run, in evaluation mode, and its record.

    Args:
        run: a run that is done.
        builder: makes the network, for a run of a custom one; its class will do where that needs no arguments.
    """
    record = run.record()
    if builder is None:
        check_has_builder(record, run.folder.name)
    if not run.model_file.exists():
        raise ValueError(_without_weights(run, record))
    described = _description(run, record) if builder is None else None
    tensors = read_tensors(run.model_file)[0]
    if builder is None:
        assert described is not None
        check_size(*described, tensors)
        model: nn.Module = build_model(described[0], *described[1])
    else:
        model, tensors = builder(), {name.replace("_orig_mod.", ""): value for name, value in tensors.items()}
        if not isinstance(model, nn.Module):
            raise TypeError(f"builder must give an nn.Module, not {model!r}")
    load_weights_(model, tensors)
    return model.eval(), record


def _description(run: Run, record: Record) -> tuple[RunConfig, tuple[int, int, int]]:
    """The config of the network, and its numbers of classes and channels and the side of its images."""
    try:
        config, data = config_of(record["config"]), record["data"]
        if lacking := [name for name in DESCRIBED if name not in record["config"]]:
            raise KeyError(lacking[0])
        return config, (len(data["classes"]), data["channels"], data["image_size"])
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{str(run.record_file)!r} does not describe its network: {error!r}") from None


def _without_weights(run: Run, record: Record) -> str:
    """Why there are none, and where they would come from."""
    name, status = run.folder.name, record["status"]
    if status in ("done", "converted"):
        return f"the run {name!r} is {status}, but its weights are not here: there is no {str(run.model_file)!r}"
    custom = record["config"].get("network") is not None
    how = "Trainer(config, run, model=...)" if custom else f"dcnet train --resume {shlex.quote(str(run.folder))}"
    hint = f"; `{how}` goes on with it"
    return f"the run {name!r} has no weights yet: its status is {status!r}{'' if status == 'diverged' else hint}"
