"""What is written down about a run: the one schema on disk."""

import math
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dcnet.environment import commit, environment
from dcnet.training.config import RunConfig
from dcnet.training.identity import Data, described_data, from_folder
from dcnet.training.lock import in_turn
from dcnet.training.meter import Reading
from dcnet.training.recipes import command_of
from dcnet.training.runs import Run

CURVES = ("step", "epoch", "learning_rate", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "seconds")
PHASES = ("start", "training", "evaluation", "saving")
# Training writes the record of these, and knows nothing of what others add to it.
UNFINISHED = ("running", "interrupted", "diverged")
Record = dict[str, Any]


class Clock:
    """Seconds by what they were spent on: the start, with all that is compiled, training, evaluation and saving."""

    def __init__(self, seconds: dict[str, float] | None = None):
        self.seconds = dict.fromkeys(PHASES, 0.0) | (seconds or {})

    @contextmanager
    def spent_on(self, phase: str) -> Iterator[None]:
        before = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - before

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def new_record(config: RunConfig, dataset: Data, image_size: int) -> Record:
    """The record of a run that has not begun."""
    data = described_data(dataset) | {"image_size": image_size}
    if config.train_images:
        data["train_images"] = config.train_images
    return {
        "name": config.name,
        "hash": config.hash,
        "status": "running",
        "command": _command(config, data),
        "commit": commit(),
        "config": config.described(),
        "environment": environment(),
        "data": data,
        "curves": {name: [] for name in CURVES},
        "results": None,
    }


def notes_of(config: RunConfig, record: Record, clock: Clock) -> dict[str, Any]:
    """What a checkpoint has beside tensors."""
    return {
        "hash": config.hash,
        "classes": record["data"]["classes"],
        "train_images": record["data"]["train_images"],
        "fingerprint": record["data"].get("fingerprint"),
        "network": config.network,
        "curves": record["curves"],
        "weights": record.get("weights"),
        "seconds": clock.seconds,
        "resumed_at": record.get("resumed_at", []),
    }


def _command(config: RunConfig, data: Mapping[str, Any]) -> str | None:
    """The command that would train the same, if there is one."""
    if config.network is not None or (config.data is not None and not from_folder(config.dataset)):
        return None
    words = [command_of(config)]
    if data.get("folder"):
        words += ["--data-dir", shlex.quote(data["folder"])]
    return " ".join([*words, "--skip-bad-images"] if data.get("skipped") else words)


def go_on(record: Record, notes: dict[str, Any], step: int, given: str | None = None) -> Clock:
    """Takes over into a new record what a checkpoint of this step noted, and gives the time that was spent.

    Args:
        record: of the run, which is changed.
        notes: of the checkpoint.
        step: of the checkpoint.
        given: the hash of the config without custom data and networks, which is all that old checkpoints know.
    """
    try:
        curves, resumed_at, clock = notes["curves"], [*notes["resumed_at"], step], Clock(notes["seconds"])
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"the checkpoint at step {step} does not say what was done before it: remove it") from None
    _check_data(record["data"], notes)
    if notes.get("network") is not None and notes["network"] != record["config"]["network"]:
        raise ValueError(f"the checkpoints of the run are of another network than {record['config']['model']}")
    older = given is not None and "network" not in notes
    if notes.get("hash") != (given if older else record["hash"]):
        raise ValueError(f"the checkpoints of the run are of another config, {notes.get('hash')}")
    record["curves"], record["resumed_at"] = curves, resumed_at
    if notes.get("weights") is not None:
        record["weights"] = notes["weights"]
    return clock


def _check_data(data: dict[str, Any], notes: dict[str, Any]) -> None:
    """Refuses data that are not those that the run was begun with; checkpoints of old do not tell."""
    known, found = notes.get("classes"), data["classes"]
    if known is not None and known != found:
        some = [", ".join(names[:3]) for names in (known, found)]
        raise ValueError(f"the run was begun with the classes {some[0]}, ..., and the data have {some[1]}, ... now")
    count = notes.get("train_images")
    if count is not None and count != data["train_images"]:
        # Epochs would have another length from here on, and other images.
        raise ValueError(f"the run was begun with {count} training images, and there are {data['train_images']} now")
    if notes.get("fingerprint") and notes["fingerprint"] != data.get("fingerprint"):
        raise ValueError(f"the run was begun with other data than {data.get('folder') or data['name']} has now")


def add_point(record: Record, **values: float) -> None:
    """One more evaluation; JSON has no word for what is not finite but null."""
    for name in CURVES:
        record["curves"][name].append(values[name] if math.isfinite(values[name]) else None)


def results(train: Reading, test: Reading) -> dict[str, float | None]:
    """What counts in the end: the last step, and never the best one on the test set."""
    return {
        "test_accuracy": test.accuracy,
        "test_error": 100 - test.accuracy,
        "test_loss": test.loss if math.isfinite(test.loss) else None,
        "train_loss": train.loss,
        "train_accuracy": train.accuracy,
    }


def timings(clock: Clock, steps: int, batch_size: int) -> dict[str, float]:
    """Where the time went; the speed is that of steps after the start."""
    training = clock.seconds["training"]
    steps = max(steps, 0)
    return {
        **clock.seconds,
        "total": clock.total,
        "step_ms": 1000 * training / max(steps, 1),
        "images_per_second": steps * batch_size / max(training, 1e-9),
    }


def add_evaluation(run: Run, name: str, values: Mapping[str, Any]) -> None:
    """Keeps what the trained network was found to do in its record, as evaluations[name], in place of what was there.

    The record is written whole or not at all, and several processes may add to it. Training a run again empties it.
    """
    if not name:
        raise ValueError("an evaluation needs a name, under which the record has it")
    # First, so that nothing is left in a folder that has no run.
    run.record()
    with in_turn(run.folder):
        record = run.record()
        if record["status"] in UNFINISHED:
            raise ValueError(f"the run {run.folder.name!r} has nothing to evaluate: its status is {record['status']!r}")
        run.write(record | {"evaluations": record.get("evaluations", {}) | {name: dict(values)}})
