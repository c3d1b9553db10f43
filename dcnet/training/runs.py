"""Folders of runs: record, weights and checkpoints; how runs are found, locked and loaded."""

import fcntl
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from dcnet.files import expanded
from dcnet.training.build import build_model, check_size
from dcnet.training.checkpoints import CHECKPOINTS, Checkpoints
from dcnet.training.config import RunConfig
from dcnet.training.identity import Data, check_buildable, check_same_run, identify
from dcnet.training.record import UNFINISHED, Evaluation, Record, read_record, write_record
from dcnet.training.state import load_weights_
from dcnet.training.tensor_files import read_tensors

ROOT = Path("runs")
# The number of runs that the message about an ambiguous name lists.
NAMED_RUNS = 4
# Required, since defaults would describe another network.
DESCRIBED = ("dataset", "model", "operator")


def runs_root() -> Path:
    """Returns the folder of all runs: DCNET_RUNS, or `runs` in the current folder."""
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
        """Returns the run of a config; its folder is named after the config.

        Args:
            config: what to train.
            root: the folder of all runs; None for `runs_root()`.
            model: the custom network of the `Trainer`, if any.
            dataset: the custom dataset of the `Trainer`, if any.
            model_name: the name of the custom network; None for the name of its class.
        """
        own = identify(config, model, dataset, model_name)
        return cls((root or runs_root()) / f"{own.name}-{own.hash}")

    @property
    def record_file(self) -> Path:
        return self.folder / "record.json"

    @property
    def model_file(self) -> Path:
        return self.folder / "model.safetensors"

    @property
    def features_file(self) -> Path:
        """The file of feature snapshots, if the config enables them."""
        return self.folder / "features.safetensors"

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.folder / CHECKPOINTS)

    @property
    def exists(self) -> bool:
        return self.record_file.exists()

    def record(self) -> Record:
        """Reads the record; raises ValueError if it is missing or invalid."""
        return read_record(self.record_file)

    def record_or_none(self) -> Record | None:
        """Reads the record; returns None if it is missing or invalid."""
        try:
            return self.record()
        except ValueError:
            return None

    def write(self, record: Record) -> None:
        write_record(self.record_file, record)

    def clear(self) -> None:
        """Removes all files except the lock, the record first: without it, leftovers do not count as a finished run."""
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

    def remove_training_files(self) -> None:
        """Removes the checkpoints of a finished run that was killed before it removed them."""
        # If the weights are missing, the checkpoints are all that is left of the run.
        if self.model_file.exists():
            with suppress(OSError):
                self.remove_leftovers()
                self.checkpoints.clear()

    @property
    def done(self) -> bool:
        return self.exists and self.record().status == "done"

    def finished_record(self, config: RunConfig) -> Record | None:
        """Returns the record if the run is done; raises ValueError if the folder has a run of another config."""
        if not self.exists:
            return None
        record = self.record()
        check_same_run(record, config, self.folder)
        return record if record.status == "done" else None


def find_run(text: str, root: Path | None = None) -> Run:
    """Finds a run by its folder, its record file, its name, or an unambiguous prefix or suffix of its name."""
    if not text:
        # An empty string, as from an unset shell variable, would match every name.
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
        names = ", ".join(run.folder.name for run in matching[:NAMED_RUNS])
        more = ", ..." if len(matching) > NAMED_RUNS else ""
        raise ValueError(f"{text!r} is ambiguous, it matches {len(matching)} runs: {names}{more}")
    raise ValueError(f"there is no run {text!r}, neither as a folder nor in {str(root)!r}: see `dcnet list runs`")


def all_runs(root: Path | None = None) -> list[Run]:
    """Returns all runs in a folder, sorted by name."""
    root = root or runs_root()
    return [Run(path.parent) for path in sorted(root.glob("*/record.json"))]


def load_model(run: Run, builder: Callable[[], nn.Module] | None = None) -> tuple[nn.Module, Record]:
    """Loads the trained network of a run, in evaluation mode, and its record.

    Args:
        run: a finished run.
        builder: a function that builds a custom network, such as its class if that needs no arguments.
    """
    record = run.record()
    if builder is None:
        check_buildable(record, run.folder.name)
    if not run.model_file.exists():
        raise ValueError(_no_weights_message(run, record))
    if builder is None:
        config, shape = _description(run, record)
        tensors = read_tensors(run.model_file)[0]
        check_size(config, shape, tensors)
        model: nn.Module = build_model(config, *shape)
    else:
        found = read_tensors(run.model_file)[0]
        model, tensors = builder(), {name.replace("_orig_mod.", ""): value for name, value in found.items()}
        if not isinstance(model, nn.Module):
            raise TypeError(f"builder must return an nn.Module, not {model!r}")
    load_weights_(model, tensors)
    return model.eval(), record


def _description(run: Run, record: Record) -> tuple[RunConfig, tuple[int, int, int]]:
    """Returns the config, and the number of classes, the number of channels and the image size."""
    missing = [f"config.{name}" for name in DESCRIBED if name not in record.config]
    missing += [f"data.{name}" for name in ("classes", "channels", "image_size") if not getattr(record.data, name)]
    if missing:
        raise ValueError(f"{str(run.record_file)!r} does not describe its network: it lacks {missing[0]}")
    try:
        config, data = record.run_config(), record.data
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{str(run.record_file)!r} does not describe its network: {error!r}") from None
    return config, (len(data.classes), data.channels, data.image_size)


def _no_weights_message(run: Run, record: Record) -> str:
    """Returns the message for a run without weights: why they are missing, and how to get them."""
    name, status = run.folder.name, record.status
    if status in ("done", "converted"):
        return f"the run {name!r} is {status}, but its weights are missing: there is no {str(run.model_file)!r}"
    custom = record.config.get("network") is not None
    how = "Trainer(config, run, model=...)" if custom else f"dcnet train --resume {shlex.quote(str(run.folder))}"
    hint = f"; `{how}` resumes it"
    return f"the run {name!r} has no weights yet: its status is {status!r}{'' if status == 'diverged' else hint}"


@contextmanager
def record_lock(folder: Path) -> Iterator[None]:
    """Locks the record in a folder; waits if another process holds the lock."""
    with (folder / ".record.lock").open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Locks a folder for this process and its children; raises ValueError if another process holds the lock.

    A folder that did not exist before, and is still empty, is removed at the end.
    """
    new, lock = not folder.exists(), folder / ".lock"
    folder.mkdir(parents=True, exist_ok=True)
    with lock.open("w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is using {str(folder)!r}: wait until it ends") from None
        try:
            yield
        finally:
            if new and list(folder.glob("*")) == [lock]:
                lock.unlink()
                folder.rmdir()


def add_evaluation(run: Run, name: str, values: Mapping[str, Any]) -> None:
    """Stores measurements of the trained network in its record as evaluations[name].

    Several processes may add evaluations at once. Training the run again removes all of them.
    """
    if not name:
        raise ValueError("the name of an evaluation must not be empty (got '')")
    # Fail before locking, which would create a file in a folder without a run.
    run.record()
    with record_lock(run.folder):
        record = run.record()
        if record.status in UNFINISHED:
            raise ValueError(
                f"evaluations need a finished run, but the status of {run.folder.name!r} is {record.status!r}"
            )
        record.evaluations[name] = Evaluation.from_json(values)
        run.write(record)
