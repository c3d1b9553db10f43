"""Several runs one after the other, from the first line to the exit code."""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console

from dcnet.training.config import RunConfig
from dcnet.training.divergence import DivergenceError
from dcnet.training.execution import Execution
from dcnet.training.lock import locked
from dcnet.training.progress import Shown
from dcnet.training.runs import Record, Run
from dcnet.training.summary import summary_table
from dcnet.training.trainer import Trainer

FAILED, USAGE, INTERRUPTED = 1, 2, 130


class Session:
    """Carries out runs that are not done yet, shows how they go, and compares them in the end."""

    def __init__(
        self,
        configs: Sequence[RunConfig],
        root: Path,
        execution: Execution,
        again: bool = False,
        as_json: bool = False,
    ):
        self.configs, self.root, self.execution, self.again = configs, root, execution, again
        self.records: list[Record] = []
        self.as_json, self.is_first = as_json, int(os.environ.get("RANK", "0")) == 0
        self.console = Console(stderr=as_json, quiet=not self.is_first)

    def run(self) -> int:
        """The exit code: 1 if a run diverged or could not be written, 2 if it could not begin, 130 if interrupted."""
        code = 0
        with Shown(self.console) as shown:
            for config in self.configs:
                try:
                    record = self._carry_out(config, shown)
                except (DivergenceError, OSError, ValueError) as error:
                    self._complain(str(error), Run.of(config, self.root))
                    code = USAGE if isinstance(error, ValueError) else FAILED
                    continue
                self.records.append(record)
                if record["status"] == "interrupted":
                    code = INTERRUPTED
                    break
        self._close()
        return code

    def _carry_out(self, config: RunConfig, shown: Shown) -> Record:
        run = Run.of(config, self.root)
        with self._hold(run):
            if run.done and not self.again:
                shown.note(f"{run.folder.name}: is done already, see {run.record_file}; --again trains it anew")
                return run.record()
            if self.again and self.is_first and run.folder.exists():
                _empty(run.folder)
            record = Trainer(config, run, self.execution, shown).run()
        if record["status"] == "interrupted":
            steps = f"{record['steps_done']} of {record['steps']} steps"
            shown.note(f"stopped after {steps}; go on with: dcnet train --resume {run.folder}")
        return record

    def _hold(self, run: Run) -> AbstractContextManager[None]:
        """Of several processes of one run, the first holds its folder."""
        return locked(run.folder) if self.is_first else nullcontext()

    def _complain(self, text: str, run: Run) -> None:
        if not self.is_first:
            return
        print(f"dcnet train: {text}", file=sys.stderr)
        files = run.checkpoints.files()
        if files:
            print(f"dcnet train: the last good checkpoint is {files[-1]}", file=sys.stderr)

    @property
    def finished(self) -> list[Record]:
        """The records of the runs that are done."""
        return [record for record in self.records if record["status"] == "done"]

    def _close(self) -> None:
        finished = self.finished
        if self.as_json and self.is_first:
            print(json.dumps([_short(record, self.root) for record in self.records], indent=2))
        elif finished:
            self.console.print(summary_table(finished))
            for record in finished:
                folder = self.root / f"{record['name']}-{record['hash']}"
                self.console.print(f"wrote {folder / 'record.json'}", soft_wrap=True, highlight=False)


def _short(record: Record, root: Path) -> dict[str, Any]:
    """What a program wants to know of a run; the rest is in its record."""
    names = ("name", "hash", "status", "steps", "steps_done", "results", "timings")
    return {"folder": str(root / f"{record['name']}-{record['hash']}"), **{name: record.get(name) for name in names}}


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != ".lock":
            path.unlink()
