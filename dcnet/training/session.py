"""Several runs in sequence: progress display, summary table and exit code of `dcnet train`."""

import json
import os
import shlex
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from dcnet.data import FolderDataset
from dcnet.exit_codes import BAD_INPUT, FAILED, INTERRUPTED
from dcnet.files import sentence_of
from dcnet.table import Table
from dcnet.terminal import print_line, resilient_console, visible
from dcnet.training.config import RunConfig
from dcnet.training.identity import Data, from_folder, load_data, load_run_data
from dcnet.training.initialization import check_weights
from dcnet.training.processes import LOST, is_lost_connection, reports
from dcnet.training.record import Point, Record
from dcnet.training.runs import Run, run_lock
from dcnet.training.setup import Execution
from dcnet.training.trainer import Callback, DivergenceError, Trainer

# On terminals narrower than this, names of runs are truncated, and some numbers are omitted.
NARROW, SHORT_NAME = 110, 20
# The largest number of damaged images that a message lists.
MAX_NAMED = 1000
# With more images than this, a message announces the check.
MANY_IMAGES = 5000


def can_redraw(console: Console) -> bool:
    """Whether the console can redraw lines: a terminal, or a notebook with widgets."""
    return console.is_terminal or (console.is_jupyter and find_spec("ipywidgets") is not None)


def progress_bar(console: Console) -> Progress:
    """Returns a bar with name, steps, the field `numbers` and remaining time; hidden if the console cannot redraw."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not can_redraw(console),
    )


class ProgressBar(Callback):
    """A callback that shows a bar on a terminal or in a notebook, and elsewhere prints a line per evaluation.

    Use it in a `with` block, as the callback of a `Trainer`.

    Args:
        console: the output; None for standard output or the notebook cell.
    """

    def __init__(self, console: Console | None = None):
        self.console, self.task = console or Console(), TaskID(0)
        self.tested, self.narrow = "", self.console.width < NARROW
        self.redraws, self.progress = can_redraw(self.console), progress_bar(self.console)

    def __enter__(self) -> "ProgressBar":
        self.progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.progress.stop()

    def on_start(self, name: str, done: int, total: int) -> None:
        self.tested = ""
        shown = f"…{name[-SHORT_NAME:]}" if self.narrow and len(name) > SHORT_NAME else name
        self.task = self.progress.add_task(shown, total=total, completed=done, numbers="")
        if done:
            self.on_message(f"{name}: resumes after step {done} of {total}")
        elif not self.redraws:
            self.on_message(name)

    def on_step(self, done: int, loss: float, accuracy: float, images_per_second: float) -> None:
        numbers = f"loss {loss:.3f}{self.tested}"
        if not self.narrow:
            numbers = f"loss {loss:.3f}  train {accuracy:.1f} %{self.tested}  {images_per_second:,.0f} images/s"
        self.progress.update(self.task, completed=done, numbers=numbers)

    def on_evaluation(self, point: Point) -> None:
        self.tested = f"  test {point.test_accuracy:.2f} %"
        if not self.redraws:
            self.on_message(
                f"step {point.step}, epoch {point.epoch:.1f}: loss {point.train_loss:.4f}, "
                f"train {point.train_accuracy:.2f} %, test {point.test_accuracy:.2f} %, {point.seconds:.0f} s"
            )

    def on_message(self, text: str) -> None:
        print_line(self.console, text)


def group_by_seed(records: Sequence[Record]) -> dict[tuple[str, str, str], list[Record]]:
    """Groups records that differ only in the seed; the keys are dataset, network and operator."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        rest = {name: value for name, value in record.settings.items() if name != "seed"}
        groups.setdefault(repr(sorted(rest.items(), key=str)), []).append(record)
    found: dict[tuple[str, str, str], list[Record]] = {}
    for members in groups.values():
        config = members[0].settings
        margin = f", {config['margin']}" if config.get("margin") else ""
        name = (config["dataset"], config["model"], config["operator"] + margin)
        # Keep the names of groups unique if they differ only in other values.
        while name in found:
            name = (*name[:2], name[2] + "'")
        found[name] = members
    return found


def format_mean(values: Sequence[float], digits: int = 2) -> str:
    """Formats the mean, with the standard deviation of several values; empty for no values."""
    if not values:
        return ""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def summary_table(records: Sequence[Record]) -> Table:
    """Returns a table of accuracy, loss and time by network; names that all runs share are in the title."""
    groups = group_by_seed(records)
    shared = [len({name[i] for name in groups}) == 1 for i in range(2)]
    seeds = max(len(members) for members in groups.values())
    same = all(len(members) == seeds for members in groups.values())
    about = f"mean ± deviation of {'' if same else 'up to '}{seeds} seeds" if seeds > 1 else "one seed"
    title = ", ".join([*(next(iter(groups))[i] for i in range(2) if shared[i]), "last step", about])
    names = [*(heading for heading, left in zip(("dataset", "network"), shared, strict=True) if not left), "operator"]
    headings = [*names, "parameters", "test accuracy, %", "train loss", "seconds a run"]
    rows = [
        [*(name[i] for i in range(2) if not shared[i]), name[2], *_numbers(members)] for name, members in groups.items()
    ]
    return Table.of_rows(headings, rows, names=len(names), title=title)


def _numbers(members: Sequence[Record]) -> list[str]:
    """Returns the cells of a row; empty where the records lack the number."""
    results = [record.results for record in members if record.results is not None]
    parameters = members[0].parameters
    seconds = _not_none(record.timings.total for record in members)
    return [
        "" if parameters is None else f"{parameters:,}",
        format_mean(_not_none(result.test_accuracy for result in results)),
        format_mean(_not_none(result.train_loss for result in results), 4),
        f"{statistics.median(seconds):.1f}" if seconds else "",
    ]


def _not_none(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


class Session:
    """Trains several configs in sequence, skips runs that are done, and prints a summary.

    Args:
        work: each config and its run.
        execution: where and how to compute.
        again: also train runs that are done.
        as_json: print the results as JSON.
        datasets: datasets that are already loaded, by the names in the configs.
        skip_bad_images: skip image files that cannot be read.
    """

    def __init__(
        self,
        work: Sequence[tuple[RunConfig, Run]],
        execution: Execution,
        again: bool = False,
        as_json: bool = False,
        datasets: Mapping[str, Data] | None = None,
        skip_bad_images: bool = False,
    ):
        self.work, self.execution, self.again = work, execution, again
        self.datasets, self.skip_bad_images = dict(datasets or {}), skip_bad_images
        self.checked: dict[str, FolderDataset] = {}
        self.runs: list[tuple[Run, Record]] = []
        self.trained: list[Run] = []
        self.stopped = False
        self.as_json, self.is_first = as_json, int(os.environ.get("RANK", "0")) == 0
        self.alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
        self.console, self.output = resilient_console("dcnet train", stderr=as_json, quiet=not self.is_first)
        self.progress = ProgressBar(self.console)

    def run(self) -> int:
        """Trains all configs; returns the exit code.

        The exit code is 1 if a run diverged or could not be written, 2 if one could not start, 130 if interrupted.
        """
        code = 0
        with self.progress:
            for place, (config, run) in enumerate(self.work):
                code = self._run_one(config, run) or code
                left = len(self.work) - place - 1
                if self.stopped and left:
                    runs = "run has" if left == 1 else "runs have"
                    # With --again, the same command would train the finished runs of this session again.
                    how = "" if self.again else "; the same command resumes"
                    self.progress.on_message(f"{left} more {runs} not started{how}")
                    code = code or INTERRUPTED
                    break
        self._print_summary()
        return code or self.output.code

    def _run_one(self, config: RunConfig, run: Run) -> int:
        """Trains one config, and prints errors; returns the exit code."""
        try:
            # The first process locks the folder for all.
            with run_lock(run.folder) if self.is_first else nullcontext():
                record = self._finished_record(config, run) or self._train(config, run)
        except (DivergenceError, ImportError, OSError, RuntimeError, ValueError) as error:
            if isinstance(error, RuntimeError) and (self.alone or not is_lost_connection(error)):
                raise
            if self.alone or reports(run.folder.name, error):
                self._print_error(LOST if isinstance(error, RuntimeError) else sentence_of(error), run)
            # With several processes, stop: the others may still be training this run.
            self.stopped = not self.alone
            return BAD_INPUT if isinstance(error, ImportError | ValueError) else FAILED
        self.runs.append((run, record))
        return INTERRUPTED if record.status == "interrupted" else 0

    def _finished_record(self, config: RunConfig, run: Run) -> Record | None:
        """Returns the record if the run is done and is not to be trained again; otherwise None."""
        # With `again`, do not read the record, which may be damaged.
        record = None if self.again else run.finished_record(config)
        if record is None:
            return None
        check_weights(record, config)
        if self.is_first:
            run.remove_training_files()
        self.progress.on_message(f"{run.folder.name} is already done, see {run.record_file}; --again trains it again")
        return record

    def _train(self, config: RunConfig, run: Run) -> Record:
        dataset = self._folder_data(config, run) if from_folder(config.dataset) else None
        trainer = Trainer(config, run, self.execution, self.progress, dataset, again=self.again)
        record = trainer.run()
        self.stopped = trainer.stopped
        if record.status == "interrupted":
            steps, folder = f"{record.steps_done} of {record.steps} steps", shlex.quote(str(run.folder))
            self.progress.on_message(f"stopped after {steps}; resume with: dcnet train --resume {folder}")
        else:
            self.trained.append(run)
        return record

    def _folder_data(self, config: RunConfig, run: Run) -> Data:
        """Loads the images of a folder, without damaged ones; a resumed run skips the same images as before."""
        found, folder = self.datasets.get(config.dataset), self.execution.data_dir
        record = run.record_or_none()
        if found is None:
            found = load_data(config, folder) if record is None else load_run_data(record, folder)
        if not isinstance(found, FolderDataset):
            return found
        if record is not None and not self.again and run.checkpoints.files():
            return found.without(set(record.data.skipped) - set(found.skipped))
        if config.dataset not in self.checked:
            self.checked[config.dataset] = self._check_images(found)
        return self.checked[config.dataset]

    def _check_images(self, found: FolderDataset) -> FolderDataset:
        """Reads all images once to find damaged ones before training; returns the dataset without them."""
        if found.held_out:
            self.progress.on_message(
                f"{found.folder} has no folders train and val: {100 * found.held_out:.0f} % of each class is held out "
                f"for testing, always the same images ({len(found.train):,} to train, {len(found.val):,} to test)"
            )
        count = len(found.train) + len(found.val)
        if count > MANY_IMAGES:
            self.progress.on_message(f"reading all {count:,} images once, to find damaged ones")
        bad = found.unreadable_images()
        if not bad:
            return found
        names = ", ".join(list(bad)[:MAX_NAMED]) + (", ..." if len(bad) > MAX_NAMED else "")
        problem = f"{len(bad):,} of {count:,} images in {found.folder} cannot be read: {names}"
        if not self.skip_bad_images:
            raise ValueError(f"{problem}; replace or delete them, or skip them with --skip-bad-images")
        self.progress.on_message(f"{problem}; they are skipped, and listed in the record")
        return found.without(list(bad))

    def _print_error(self, text: str, run: Run) -> None:
        print(f"dcnet train: {visible(text)}", file=sys.stderr)
        if files := run.checkpoints.files():
            print(f"dcnet train: the newest checkpoint is {visible(files[-1])}", file=sys.stderr)

    @property
    def finished(self) -> list[Record]:
        """The records of the runs that are done."""
        return [record for _, record in self.runs if record.status == "done"]

    def _print_summary(self) -> None:
        if self.as_json and self.is_first:
            print(json.dumps([_json_summary(record, run) for run, record in self.runs], indent=2))
        elif self.finished:
            self.console.print(summary_table(self.finished))
            for run in self.trained:
                self.progress.on_message(f"wrote {run.record_file}")


def _json_summary(record: Record, run: Run) -> dict[str, Any]:
    """Returns the main values of a record."""
    names, values = ("name", "hash", "status", "steps", "steps_done", "results", "timings"), record.to_json()
    return {"folder": str(run.folder), **{name: values.get(name) for name in names}}
