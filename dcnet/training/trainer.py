"""The training loop: trains a config, and writes its record, weights and checkpoints."""

import dataclasses
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path

from torch import nn

from dcnet.files import check_utf8
from dcnet.interrupts import Interruption, interruptible
from dcnet.training.checkpoints import Checkpoint, check_room, checkpoint_notes, resume_record
from dcnet.training.config import RunConfig
from dcnet.training.identity import Data, check_network, check_same_run, class_of, identify
from dcnet.training.processes import agree, gather_objects
from dcnet.training.record import Point, Record, Results, Timings, finite
from dcnet.training.runs import Run
from dcnet.training.setup import Execution, Setup
from dcnet.training.state import stream_weights
from dcnet.training.step import LOSS_ITSELF, Reading, find_bad_layer
from dcnet.training.tensor_files import write_tensors

# Steps between two reads of the meter, by device; on a GPU each read synchronizes.
READ_EVERY = {"cpu": 1, "cuda": 50}
# The first steps with images of one size include compilation and graph capture, so they count as start.
STARTING = 5
PHASES = ("start", "training", "evaluation", "saving")


class Callback:
    """The base of callbacks for training progress; does nothing. `dcnet.training.session.ProgressBar` is an example."""

    def on_start(self, name: str, done: int, total: int) -> None:
        """Called when a run starts, or resumes after `done` of its `total` steps."""

    def on_step(self, done: int, loss: float, accuracy: float, images_per_second: float) -> None:
        """Called after some steps; loss and accuracy are means over the training images since the last evaluation."""

    def on_evaluation(self, point: Point) -> None:
        """Called after an evaluation on the test set."""

    def on_end(self, record: Record) -> None:
        """Called when the run is done or interrupted."""

    def on_message(self, text: str) -> None:
        """Called with a message of one line for the user."""


class DivergenceError(ArithmeticError):
    """The loss or a gradient was not finite; the message names the step and the layer."""


class Clock:
    """Measures seconds per phase: start (with all compilation), training, evaluation and saving."""

    def __init__(self, seconds: dict[str, float] | None = None):
        self.seconds = dict.fromkeys(PHASES, 0.0) | (seconds or {})

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        before = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - before

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def timings(self, steps: int, batch_size: int) -> Timings:
        """Returns the seconds of all phases, and the speed of the training phase, which had `steps` steps."""
        training, steps = self.seconds["training"], max(steps, 0)
        speed = {"step_ms": 1000 * training / max(steps, 1)}
        speed["images_per_second"] = steps * batch_size / max(training, 1e-9)
        return Timings.from_json({**self.seconds, "total": self.total, **speed})


class Trainer:
    """Trains one run; resumes from its newest checkpoint if it has one.

    After `run()`, `stopped` is True if Ctrl-C or SIGTERM was received, even if the run was done by then. The attribute
    `config` has the names and fingerprints of a custom network and dataset.

    Args:
        config: what to train.
        run: the folder of the run; `Run.of(config, model=model, dataset=dataset)` returns one with the right name.
        execution: where and how to compute.
        callback: notified of progress.
        dataset: a custom dataset; None for the one of the config.
        model: a custom network, whose inputs are pixels in [0, 1]; None for the one of the config.
        again: train again if the run is done or has checkpoints.
        model_name: the name of the custom network; None for the name of its class.
    """

    def __init__(
        self,
        config: RunConfig,
        run: Run,
        execution: Execution | None = None,
        callback: Callback | None = None,
        dataset: Data | None = None,
        model: nn.Module | None = None,
        again: bool = False,
        model_name: str | None = None,
    ):
        self.execution = execution or Execution()
        check_network(model, config, self.execution.shard_head)
        known = run.record_or_none()
        own_data = None if dataset is None or _lacks_fingerprint(known, config, dataset) else dataset
        given, config = config, identify(config, model, own_data, model_name)
        self.config, self.folder = config, run
        self.callback, self.stopped = callback or Callback(), False
        for folder in (run.folder, self.execution.data_dir):
            check_utf8(folder or Path())
        found, problems = (None, []) if again else run.checkpoints.newest()
        if known is not None and found is None:
            check_same_run(known, config, run.folder)
        # A run that ended before its first checkpoint has a record, too.
        if known is not None and (found is not None or (known.hash == config.hash and not again)):
            self.execution = _started_execution(self.execution, known)
        self.setup = Setup(config, run.folder, self.execution, dataset, model, fresh=found is None)
        self.record = self.setup.new_record(None if model is None else class_of(model))
        self.total, self.done, self.started_at = self.setup.total_steps, 0, 0
        self.clock, self.last_saved = Clock(), time.monotonic()
        self.read_every = READ_EVERY[self.setup.device.type]
        self.evaluate_every = config.evaluate_every or self.setup.source.steps_per_epoch
        self.since, self.since_time, self.replaces = 0, 0.0, False
        if self.setup.is_first:
            run.remove_leftovers()
        if config != given and run.folder.name == f"{given.name}-{given.hash}":
            self.callback.on_message(
                f"{run.folder} holds the run {config.name}-{config.hash}, but has another name: "
                "Run.of(config, model=..., dataset=...) returns a folder of the right name"
            )
        for problem in problems:
            self.callback.on_message(f"{problem}; {'using the one before it' if found else 'the run starts again'}")
        if self.setup.loaded is not None:
            self.callback.on_message(f"{config.name}: {self.setup.loaded}")
        if found is not None:
            self._resume(found, given.hash)
        elif self.setup.is_first:
            check_room(run.folder, self.setup.model)
            self.replaces = again
            self._write("running")

    def _resume(self, checkpoint: Checkpoint, given: str) -> None:
        self.clock = Clock(resume_record(self.record, checkpoint.notes, checkpoint.step, given))
        self.setup.restore_(checkpoint.step, checkpoint.shards)
        self.done = self.started_at = checkpoint.step

    def run(self) -> Record:
        """Trains until the run is done or interrupted; returns the record with this status."""
        accelerator, tracker = self.setup.accelerator, self.execution.tracker
        if tracker:
            accelerator.init_trackers("dcnet", {"name": self.config.name, "seed": self.config.seed})
        adversary = self.setup.step.objective.adversary
        cost = "" if adversary is None else f", {adversary.cost:g}x the passes"
        self.callback.on_start(self.config.name + cost, self.done, self.total)
        with interruptible() as interruption, closing(self.setup.source):
            self._finish(self._train(interruption))
            self.stopped = self.setup.any_process(interruption.requested)
        self.callback.on_end(self.record)
        if tracker:
            accelerator.end_training()
        return self.record

    def _train(self, interruption: Interruption) -> str:
        """Trains, evaluates and saves; returns the status of the run."""
        self.setup.model.train()
        if self.done == 0:
            self.setup.init_statistics()
        self.since, self.since_time = self.done, time.perf_counter()
        while self.done < self.total:
            evaluated = self._one_step()
            self._remove_replaced()
            stops = interruption.requested
            if self.setup.processes > 1:
                stops = self.done % self.read_every == 0 and self.setup.any_process(stops)
            if stops and self.done < self.total:
                self.save()
                return "interrupted"
            if self.done < self.total and self._save_is_due(evaluated):
                self.save()
                self._write("running")
        return "done"

    def _one_step(self) -> bool:
        """Runs one training step; reads the meter and evaluates if due. Returns whether an evaluation was due."""
        starts = (self.started_at, *self.setup.source.size_changes)
        starting = any(0 <= self.done - start < STARTING for start in starts)
        due = (self.done + 1) % self.evaluate_every == 0 or self.done + 1 == self.total
        with self.clock.measure("start" if starting else "training"):
            self.setup.train_step(self.done, self.record.curves.train_loss)
            self.done += 1
            # Before a change of the image size, wait for the device: its queued work counts as training, not as start.
            reads = starting or due or self.done % self.read_every == 0 or self.done in starts
            reading = self._read_meter() if reads else None
        if due and reading is not None:
            self._evaluate(reading)
        return due

    def _read_meter(self) -> Reading:
        """Waits for the device, and reports progress; raises DivergenceError if a step was not finite."""
        reading = self.setup.meter.read()
        if reading.bad_step is not None:
            with self.setup.accelerator.autocast():
                own = find_bad_layer(self.setup.model, self.setup.source.images(reading.bad_step))
            # Each process has other images, and possibly other weights.
            found = gather_objects(own)
            where = next((text for text in found if text != LOSS_ITSELF), LOSS_ITSELF)
            self._write("diverged")
            raise DivergenceError(
                f"{self.config.name}: the loss or a gradient of step {reading.bad_step + 1} is not finite: {where}; "
                "try a smaller --lr, or --precision float32"
            )
        now, images = time.perf_counter(), (self.done - self.since) * self.config.batch_size
        self.callback.on_step(self.done, reading.loss, reading.accuracy, images / max(now - self.since_time, 1e-9))
        self.since, self.since_time = self.done, now
        return reading

    def _evaluate(self, train: Reading) -> None:
        with self.clock.measure("evaluation"):
            test = self.setup.evaluate(self.done)
            refreshed = self.setup.evaluate_refreshed()
        self.setup.meter.reset()
        point = Point(
            step=self.done,
            epoch=self.done / self.setup.source.steps_per_epoch,
            learning_rate=self.setup.rate,
            train_loss=train.loss,
            train_accuracy=train.accuracy,
            test_loss=test.loss,
            test_accuracy=test.accuracy,
            seconds=self.clock.total,
            refreshed_accuracy=None if refreshed is None else refreshed.accuracy,
        )
        self.record.curves.add(point)
        # The results are those of the last step, not of the step that is best on the test set.
        self.record.results = Results(
            test_accuracy=test.accuracy,
            test_error=100 - test.accuracy,
            test_loss=finite(test.loss),
            train_loss=train.loss,
            train_accuracy=train.accuracy,
            given=frozenset(["test_loss"]),
        )
        self.callback.on_evaluation(point)
        if self.execution.tracker:
            values = {name: value for name, value in vars(point).items() if value is not None}
            self.setup.accelerator.log(values, step=self.done)
        self.since_time = time.perf_counter()

    def save(self) -> None:
        """Writes a checkpoint; all processes must call this, and all raise if one cannot write.

        If weights are sharded, each process writes its shards; otherwise the first one writes.
        """
        with self.clock.measure("saving"):
            checkpoints, is_first = self.folder.checkpoints, self.setup.is_first
            notes = checkpoint_notes(self.config, self.record, self.clock.seconds)
            if self.setup.sharded:
                checkpoints.save_parts(self.done, self.setup.parts(), notes, is_first)
            else:
                tensors = self.setup.tensors()
                agree(lambda: checkpoints.save(self.done, tensors, notes) if is_first else None)
            self.last_saved = time.monotonic()

    def _save_is_due(self, evaluated: bool) -> bool:
        """Whether a checkpoint is due; by time, only after an evaluation, and the first process decides for all."""
        if self.execution.checkpoint_every:
            return self.done % self.execution.checkpoint_every == 0
        if not evaluated:
            return False
        waited = time.monotonic() - self.last_saved >= self.execution.checkpoint_seconds
        return self.setup.any_process(waited and self.setup.is_first)

    def _finish(self, status: str) -> None:
        if status == "done":
            self._write_weights()
        self._write(status)
        if status == "done" and self.setup.is_first:
            self.folder.checkpoints.clear()

    def _write_weights(self) -> None:
        stream_weights(self.folder.model_file, self.setup.model, {"config": self.config.described()})
        if self.setup.is_first and self.setup.snapshots is not None:
            write_tensors(self.folder.features_file, self.setup.snapshots.state(), {})

    def _remove_replaced(self) -> None:
        """With `again`, removes the old run after the first step of the new one, which may fail before."""
        if self.replaces:
            self.replaces = False
            self.folder.clear()
            self._write("running")

    def _write(self, status: str) -> None:
        # The first steps after a start, and after each change of the image size, are not timed.
        starts = {0, *self.record.resumed_at, *self.setup.source.size_changes}
        parts = pairwise([*sorted(start for start in starts if start < self.done), self.done])
        timed = self.done - sum(min(STARTING, after - before) for before, after in parts)
        self.record.status, self.record.steps_done = status, self.done
        self.record.timings = self.clock.timings(timed, self.config.batch_size)
        record = self.record if status == "done" else dataclasses.replace(self.record, results=None)
        if self.setup.is_first and not self.replaces:
            self.folder.write(record)


def _started_execution(execution: Execution, known: Record) -> Execution:
    """The execution with the head sharded as when the run was started, unless it says whether to shard it."""
    asked = execution.shard_head
    return dataclasses.replace(execution, shard_head=known.execution.get("shard_head") if asked is None else asked)


def _lacks_fingerprint(record: Record | None, config: RunConfig, dataset: Data) -> bool:
    """Whether a run on a folder of images has an old record, whose config has no data fingerprint."""
    if record is None:
        return False
    loaded_by_name = dataset.origin is not None and dataset.origin.name == config.dataset
    return loaded_by_name and config.data is None and record.hash == config.hash
