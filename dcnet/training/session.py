"""Several runs one after the other, from the first line to the exit code."""

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from dcnet.data import FolderDataset
from dcnet.escapes import visible
from dcnet.files import sentence_of
from dcnet.output import lasting_console
from dcnet.training.config import RunConfig
from dcnet.training.divergence import DivergenceError
from dcnet.training.execution import Execution
from dcnet.training.identity import Data, check_is_of, data_of, from_folder, load_data
from dcnet.training.lock import locked
from dcnet.training.pretrained import check_weights
from dcnet.training.progress import Shown
from dcnet.training.runs import Record, Run
from dcnet.training.summary import summary_table
from dcnet.training.trainer import Trainer

FAILED, USAGE, INTERRUPTED = 1, 2, 130
# Damaged images that are named.
MOST_NAMED = 1000
# Images that take a while to look at.
MANY = 5000


class Session:
    """Carries out configs, each in the folder of its run, unless they are done; shows how it goes, and compares.

    Args:
        work: configs, and the folders of their runs.
        execution: where and how to compute.
        again: train anew what is done.
        as_json: print what came out as JSON.
        datasets: those that are loaded already, by their names in the configs.
        skip_bad_images: leave out the images of a folder that cannot be read.
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
        self.looked_at: dict[str, FolderDataset] = {}
        self.runs: list[tuple[Run, Record]] = []
        self.trained: list[Run] = []
        self.stopped = False
        self.as_json, self.is_first = as_json, int(os.environ.get("RANK", "0")) == 0
        self.alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
        self.console, self.output = lasting_console("dcnet train", stderr=as_json, quiet=not self.is_first)

    def run(self) -> int:
        """The exit code: 1 if a run diverged or could not be written, 2 if it could not begin, 130 if interrupted."""
        code = 0
        with Shown(self.console) as shown:
            for place, (config, run) in enumerate(self.work):
                code = self._attempt(config, run, shown) or code
                left = len(self.work) - place - 1
                if self.stopped and left:
                    runs = "run has" if left == 1 else "runs have"
                    # With --again it would begin anew with what has been trained just now.
                    how = "" if self.again else "; the same command goes on"
                    shown.note(f"{left} more {runs} not begun{how}")
                    code = code or INTERRUPTED
                    break
        self._close()
        return code or self.output.code

    def _attempt(self, config: RunConfig, run: Run, shown: Shown) -> int:
        try:
            record = self._carry_out(config, run, shown)
        except (DivergenceError, ImportError, OSError, ValueError) as error:
            self._complain(sentence_of(error), run)
            # Other processes may have got further in this run, and would meet this one in the next.
            self.stopped = not self.alone
            return USAGE if isinstance(error, ImportError | ValueError) else FAILED
        self.runs.append((run, record))
        return INTERRUPTED if record["status"] == "interrupted" else 0

    def _carry_out(self, config: RunConfig, run: Run, shown: Shown) -> Record:
        with self._hold(run):
            if (known := run.record_if_any()) is not None:
                check_is_of(known, config, run.folder)
            if not self.again and run.done:
                check_weights(run.record(), config)
                if self.is_first:
                    run.put_away()
                shown.note(f"{run.folder.name}: is done already, see {run.record_file}; --again trains it anew")
                return run.record()
            dataset = self._images_of(config, run, shown) if from_folder(config.dataset) else None
            trainer = Trainer(config, run, self.execution, shown, dataset, again=self.again)
            record = trainer.run()
        self.stopped = trainer.stopped
        if record["status"] == "interrupted":
            steps = f"{record['steps_done']} of {record['steps']} steps"
            shown.note(f"stopped after {steps}; go on with: dcnet train --resume {shlex.quote(str(run.folder))}")
        else:
            self.trained.append(run)
        return record

    def _images_of(self, config: RunConfig, run: Run, shown: Shown) -> Data:
        """The data of a folder: as a run had them that goes on, and looked at where it begins."""
        found, folder = self.datasets.get(config.dataset), self.execution.data_dir
        record = run.record_if_any()
        if found is None:
            found = load_data(config, folder) if record is None else data_of(record, folder)
        if not isinstance(found, FolderDataset):
            return found
        if record is not None and not self.again and run.checkpoints.files():
            left_out = set(record["data"].get("skipped", [])) - set(found.skipped)
            return found.without(left_out)
        if config.dataset not in self.looked_at:
            self.looked_at[config.dataset] = self._looked_at(found, shown)
        return self.looked_at[config.dataset]

    def _looked_at(self, found: FolderDataset, shown: Shown) -> FolderDataset:
        """The images that can be read; the others are all named at once, before the first step."""
        if found.held_out:
            shown.note(
                f"{found.folder} has no train and val: split into {len(found.train):,} images to train on and "
                f"{len(found.val):,} to test with, {100 * found.held_out:.0f} % of each class, always the same ones"
            )
        count = len(found.train) + len(found.val)
        if count > MANY:
            shown.note(f"reading all {count:,} images once, to name those that are damaged")
        bad = found.bad_images()
        if not bad:
            return found
        names = ", ".join(list(bad)[:MOST_NAMED]) + (", ..." if len(bad) > MOST_NAMED else "")
        told = f"{len(bad):,} of {count:,} images in {found.folder} cannot be read: {names}"
        if not self.skip_bad_images:
            raise ValueError(f"{told}; replace or delete them, or leave them out with --skip-bad-images")
        shown.note(f"{told}; they are left out, as the record says")
        return found.without(list(bad))

    def _hold(self, run: Run) -> AbstractContextManager[None]:
        """Of several processes of one run, the first holds its folder."""
        return locked(run.folder) if self.is_first else nullcontext()

    def _complain(self, text: str, run: Run) -> None:
        if not self.is_first:
            return
        print(f"dcnet train: {visible(text)}", file=sys.stderr)
        files = run.checkpoints.files()
        if files:
            print(f"dcnet train: the last good checkpoint is {visible(files[-1])}", file=sys.stderr)

    @property
    def finished(self) -> list[Record]:
        """The records of the runs that are done."""
        return [record for _, record in self.runs if record["status"] == "done"]

    def _close(self) -> None:
        if self.as_json and self.is_first:
            print(json.dumps([_short(record, run) for run, record in self.runs], indent=2))
        elif self.finished:
            self.console.print(summary_table(self.finished))
            for run in self.trained:
                self.say(f"wrote {run.record_file}")

    def say(self, text: str) -> None:
        """One line as it is, whatever there is in it."""
        self.console.print(visible(text), soft_wrap=True, highlight=False, markup=False)


def _short(record: Record, run: Run) -> dict[str, Any]:
    """What a program wants to know of a run; the rest is in its record."""
    names = ("name", "hash", "status", "steps", "steps_done", "results", "timings")
    return {"folder": str(run.folder), **{name: record.get(name) for name in names}}
