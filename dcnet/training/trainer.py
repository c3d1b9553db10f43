"""The loop: from a config to a record and trained weights, through any number of interruptions."""

import time
from contextlib import closing
from itertools import pairwise
from pathlib import Path

from torch import nn

from dcnet.files import check_utf8
from dcnet.training.checkpoints import Checkpoint, check_room, write_tensors
from dcnet.training.config import RunConfig
from dcnet.training.divergence import DivergenceError, first_bad_layer
from dcnet.training.execution import Execution
from dcnet.training.identity import Data, check_is_of, class_of
from dcnet.training.interruption import Interruption, interruptible
from dcnet.training.meter import Reading
from dcnet.training.records import Clock, Record, add_point, go_on, new_record, notes_of, results, timings
from dcnet.training.runs import Run, identified
from dcnet.training.state import MODEL
from dcnet.training.watching import Watcher
from dcnet.training.workspace import Workspace, check_network

# Steps from one look at the device to the next: on a GPU it would have to wait for each.
LOOK_EVERY = {"cpu": 1, "cuda": 50}
# The first steps compile and capture.
STARTING = 5


class Trainer:
    """One run; `run` carries it out, from its newest checkpoint if it has one, or anew if it is to be done again.

    `stopped` says afterwards whether somebody asked to stop, be it too late for this run. `config` is that of the
    record: a custom network or dataset has its own name there, and a fingerprint, which make this another run.

    Args:
        config: what is trained.
        run: its folder; `Run.of(config, model=model, dataset=dataset)` gives one with the right name.
        execution: where and how to compute.
        watcher: is told how it goes.
        dataset: a custom dataset in place of that of the config.
        model: a custom network in place of that of the config; it is given pixels from 0 to 1.
        again: train anew what has been trained.
        model_name: what to call the network; None for its class.
    """

    def __init__(
        self,
        config: RunConfig,
        run: Run,
        execution: Execution | None = None,
        watcher: Watcher | None = None,
        dataset: Data | None = None,
        model: nn.Module | None = None,
        again: bool = False,
        model_name: str | None = None,
    ):
        check_network(model, config)
        known = run.record_if_any()
        own_data = None if dataset is None or _is_older(known, config, dataset) else dataset
        given, config = config, identified(config, model, own_data, model_name)
        self.config, self.folder, self.execution = config, run, execution or Execution()
        self.watcher, self.stopped = watcher or Watcher(), False
        for folder in (run.folder, self.execution.data_dir):
            check_utf8(folder or Path())
        found, complaints = (None, []) if again else run.checkpoints.newest()
        if known is not None and found is None:
            check_is_of(known, config, run.folder)
        self.space = Workspace(config, run, self.execution, dataset, model, begins=found is None)
        self.record = new_record(config, self.space.dataset, self.space.image_size) | self.space.described()
        self.record |= {} if model is None else {"network_class": class_of(model)}
        self.total, self.done, self.begun_at = self.space.total_steps, 0, 0
        self.clock, self.last_saved = Clock(), time.monotonic()
        self.look_every = LOOK_EVERY[self.space.device.type]
        self.evaluate_every = config.evaluate_every or self.space.source.steps_per_epoch
        self.since, self.since_time, self.replaces = 0, 0.0, False
        if self.space.is_first:
            run.remove_leftovers()
        if config != given and run.folder.name == f"{given.name}-{given.hash}":
            self.watcher.note(
                f"{run.folder} is named after another run than {config.name}-{config.hash}, which it holds: "
                "Run.of(config, model=..., dataset=...) gives a folder of that name"
            )
        for complaint in complaints:
            self.watcher.note(f"{complaint}; {'the one before it is used' if found else 'the run begins anew'}")
        if self.space.loaded is not None:
            self.watcher.note(f"{config.name}: {self.space.loaded}")
        if found is not None:
            self._go_on_from(found, given.hash)
        elif self.space.is_first:
            self._begin(again)

    def _begin(self, again: bool) -> None:
        check_room(self.folder.folder, self.space.model)
        if not again:
            self._write("running")
        self.replaces = again

    def _replace_old(self) -> None:
        """Removes what was trained before, when a step is done: until then anything may turn out to be missing."""
        if self.replaces:
            self.replaces = False
            self.folder.empty()
            self._write("running")

    def _go_on_from(self, checkpoint: Checkpoint, given: str) -> None:
        self.clock = go_on(self.record, checkpoint.notes, checkpoint.step, given)
        self.space.restore_(checkpoint.step, checkpoint.tensors)
        self.done = self.begun_at = checkpoint.step

    def run(self) -> Record:
        """Trains to the end, or to an interruption, and gives the record; see its status for which."""
        accelerator, tracker = self.space.accelerator, self.execution.tracker
        if tracker:
            accelerator.init_trackers("dcnet", {"name": self.config.name, "seed": self.config.seed})
        self.watcher.starts(self._shown_name(), self.done, self.total)
        with interruptible() as interruption, closing(self.space.source):
            self._close(self._train(interruption))
            self.stopped = self.space.any_process(interruption.asked)
        self.watcher.ends(self.record)
        if tracker:
            accelerator.end_training()
        return self.record

    def _shown_name(self) -> str:
        adversary = self.space.step.objective.adversary
        return self.config.name + ("" if adversary is None else f", {adversary.cost:g}x the passes")

    def _close(self, status: str) -> None:
        if status == "done":
            self._keep_weights()
        self._write(status)
        if status == "done" and self.space.is_first:
            self.folder.checkpoints.clear()

    def _train(self, interruption: Interruption) -> str:
        self.space.model.train()
        if self.done == 0:
            self.space.start_statistics()
        self.since, self.since_time = self.done, time.perf_counter()
        while self.done < self.total:
            due = self._one_step()
            self._replace_old()
            stops = interruption.asked
            if self.space.processes > 1:
                stops = self.done % self.look_every == 0 and self.space.any_process(stops)
            if stops and self.done < self.total:
                self.save()
                return "interrupted"
            self._save_if_due(due)
        return "done"

    def _one_step(self) -> bool:
        """Trains, and looks and evaluates where that is due; says whether it evaluated."""
        starting = self.done - self.begun_at < STARTING
        due = (self.done + 1) % self.evaluate_every == 0 or self.done + 1 == self.total
        with self.clock.spent_on("start" if starting else "training"):
            self.space.train_on(self.done, self.record["curves"]["train_loss"])
            self.done += 1
            looks = starting or due or self.done % self.look_every == 0
            reading = self._look() if looks else None
        if due and reading is not None:
            self._evaluate(reading)
        return due

    def _look(self) -> Reading:
        """Waits for the device, and tells how it goes."""
        reading = self.space.meter.read()
        if reading.bad_step is not None:
            self._diverged(reading.bad_step)
        now = time.perf_counter()
        images = (self.done - self.since) * self.config.batch_size
        self.watcher.steps(self.done, reading.loss, reading.accuracy, images / max(now - self.since_time, 1e-9))
        self.since, self.since_time = self.done, now
        return reading

    def _diverged(self, step: int) -> None:
        where = first_bad_layer(self.space.model, self.space.source.images(step))
        self._write("diverged")
        raise DivergenceError(
            f"{self.config.name}: the loss or a gradient of step {step + 1} is not finite: {where}; "
            "try a smaller --lr, or --precision float32"
        )

    def _evaluate(self, train: Reading) -> None:
        with self.clock.spent_on("evaluation"):
            test = self.space.evaluate(self.done)
        self.space.meter.reset()
        point = {
            "step": self.done,
            "epoch": self.done / self.space.source.steps_per_epoch,
            "learning_rate": self.space.rate,
            "train_loss": train.loss,
            "train_accuracy": train.accuracy,
            "test_loss": test.loss,
            "test_accuracy": test.accuracy,
            "seconds": self.clock.total,
        }
        add_point(self.record, **point)
        self.record["results"] = results(train, test)
        self.watcher.evaluated(point)
        if self.execution.tracker:
            self.space.accelerator.log(point, step=self.done)
        self.since_time = time.perf_counter()

    def save(self) -> None:
        """Writes a checkpoint; all processes have to call it, and one of them writes."""
        with self.clock.spent_on("saving"):
            tensors = self.space.tensors()
            self.last_saved = time.monotonic()
            if self.space.is_first:
                self.folder.checkpoints.save(self.done, tensors, notes_of(self.config, self.record, self.clock))

    def _save_if_due(self, evaluated: bool) -> None:
        every = self.execution.checkpoint_every
        if self.done == self.total:
            return
        if self.done % every == 0 if every else evaluated and self._waited():
            self.save()
            self._write("running")

    def _waited(self) -> bool:
        """Whether the last checkpoint was long ago; the first process decides for all."""
        waited = time.monotonic() - self.last_saved >= self.execution.checkpoint_seconds
        return self.space.any_process(waited and self.space.is_first)

    def _keep_weights(self) -> None:
        tensors = self.space.tensors()
        weights = {name: value for name, value in tensors.items() if name.startswith(MODEL)}
        if self.space.is_first:
            write_tensors(self.folder.model_file, weights, {"config": self.config.described()})
            if self.space.snapshots is not None:
                write_tensors(self.folder.features_file, self.space.snapshots.state(), {})

    def _timed_steps(self) -> int:
        """The steps so far but the first ones of the run, and of each time that it went on."""
        parts = pairwise([0, *self.record.get("resumed_at", []), self.done])
        return self.done - sum(min(STARTING, after - before) for before, after in parts)

    def _write(self, status: str) -> None:
        self.record |= {
            "status": status,
            "steps_done": self.done,
            "timings": timings(self.clock, self._timed_steps(), self.config.batch_size),
        }
        described = self.record if status == "done" else self.record | {"results": None}
        if self.space.is_first and not self.replaces:
            self.folder.write(described)


def _is_older(record: Record | None, config: RunConfig, dataset: Data) -> bool:
    """Whether a run on a folder of images has an identity without them, as all had once."""
    if record is None:
        return False
    loaded_by_name = dataset.origin is not None and dataset.origin.name == config.dataset
    return loaded_by_name and config.data is None and record.get("hash") == config.hash
