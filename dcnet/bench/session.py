"""A benchmark from the first step to the exit code: progress, tables, the record and the picture."""

import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from dcnet.bench.benchmark import Benchmark, Steps
from dcnet.bench.group import complaints, skips
from dcnet.bench.show import tables
from dcnet.environment import commit, environment
from dcnet.files import write_json
from dcnet.output import lasting_console

WRONG, INTERRUPTED = 1, 130


class _Shown(Steps):
    """Steps as a bar with the time that is left."""

    def __init__(self, progress: Progress, total: int):
        self.progress, self.task = progress, progress.add_task("starting", total=total)

    def say(self, text: str) -> None:
        self.progress.update(self.task, description=text)

    def advance(self) -> None:
        self.progress.advance(self.task)


class Session:
    """Runs one benchmark, and keeps its record up to date on the way."""

    def __init__(self, benchmark: Benchmark, json: Path | None, plot: Path | None, console: Console | None = None):
        self.benchmark, self.json, self.plot = benchmark, json, plot
        lasting, self.output = lasting_console(f"dcnet bench {benchmark.name}")
        self.console = console or lasting
        self.record: dict[str, Any] = {"benchmark": benchmark.name, "complete": False, "config": benchmark.described()}

    def run(self) -> int:
        """The exit code: 1 where something was wrong or could not be run, 130 after an interruption."""
        try:
            self._measure()
        except KeyboardInterrupt:
            return self._stop()
        for table in tables(self.record):
            self.console.print(table)
        self._write_all()
        for skip in skips(self.record["results"]):
            print(f"dcnet bench {self.benchmark.name}: {skip}", file=sys.stderr)
        problems = complaints(self.record["results"])
        for problem in problems:
            print(f"dcnet bench {self.benchmark.name}: {problem}", file=sys.stderr)
        return WRONG if problems else self.output.code

    def _measure(self) -> None:
        torch.set_num_threads(self.benchmark.config.threads)
        self.record |= {"commit": commit(), "environment": environment(), "results": []}
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self.console) as progress:
            steps = _Shown(progress, self.benchmark.step_count)
            self.record |= self.benchmark.prepare()
            for rows in self.benchmark.measure(steps):
                self.record["results"] += rows
                self._write()
        self.record |= {"complete": True, **self.benchmark.summary(self.record["results"])}

    def _stop(self) -> int:
        """Keeps what was measured before the interruption."""
        measured = self.record.get("results", [])
        told = "nothing was measured"
        if measured:
            told = f"{len(measured)} results were measured"
            self.record |= self.benchmark.summary(measured)
            self._write()
            told += f", and are in {self.json}" if self.json else ", and are lost without --json"
        print(f"dcnet bench {self.benchmark.name}: interrupted before the end: {told}", file=sys.stderr)
        return INTERRUPTED

    def _write(self) -> None:
        if self.json:
            write_json(self.json, self.record)

    def _write_all(self) -> None:
        self._write()
        if self.plot:
            # Drawing needs matplotlib, which measuring does not.
            from dcnet.report import plots

            plots.save(plots.benchmark(self.record), self.plot)
        for path in (self.json, self.plot):
            if path:
                self.console.print(f"wrote {path}", soft_wrap=True, highlight=False)
