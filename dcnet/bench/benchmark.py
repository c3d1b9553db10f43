"""The base of all benchmarks: configuration, groups of rows, and the session that writes the record."""

import functools
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from dcnet.bench import correctness
from dcnet.bench.meter import Call, Clock, Meter, Stopwatch, summarize, time_rounds
from dcnet.environment import commit, environment
from dcnet.exit_codes import FAILED, INTERRUPTED
from dcnet.files import write_json
from dcnet.report import drawing, speed_plots
from dcnet.report.speed_tables import terminal_tables
from dcnet.terminal import resilient_console

Row = dict[str, Any]


class Steps:
    """Shows the progress of a benchmark; does nothing without a progress bar."""

    def __init__(self, progress: Progress | None = None, total: int = 0):
        self.progress = Progress(disable=True) if progress is None else progress
        self.task = self.progress.add_task("starting", total=total)

    def say(self, text: str) -> None:
        """Describes the next step."""
        self.progress.update(self.task, description=text)

    def advance(self) -> None:
        """Counts one finished step."""
        self.progress.advance(self.task)

    def status(self) -> str:
        """The share of finished steps, the elapsed time, and an estimate of the time left."""
        task = self.progress.tasks[self.task]
        elapsed, done = task.elapsed or 0.0, task.completed / task.total if task.total else 1.0
        left = f", about {elapsed * (1 / done - 1):.0f} s left" if 0 < done < 1 else ""
        return f"{task.description.partition(': timing')[0]}: {done:.0%} done after {elapsed:.0f} s{left}"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of every benchmark."""

    device: str
    operators: list[str]
    threads: int
    repeats: int = 20
    warmup: int = 3


class Deadline:
    """A time limit in minutes; None for no limit."""

    def __init__(self, minutes: float | None):
        self.minutes, self.started = minutes, time.monotonic()

    @property
    def passed(self) -> str:
        """The reason to start nothing more; empty before the deadline."""
        late = self.minutes is not None and time.monotonic() - self.started > 60 * self.minutes
        return f"the limit of {self.minutes:g} minutes had passed" if late else ""


AnyConfig = TypeVar("AnyConfig", bound=Config)
Made = TypeVar("Made")


class Benchmark(ABC, Generic[AnyConfig]):
    """Measures groups of rows; ratios are relative to the base row of a group.

    Args:
        config: the options.
        meter: measures on the device.
        dtype: the name of the dtype that is timed.
        tolerances: the largest accepted error, by dtype.
    """

    name: ClassVar[str]

    def __init__(self, config: AnyConfig, meter: Meter, dtype: str, tolerances: Mapping[torch.dtype, float]):
        self.config, self.meter = config, meter
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.tolerance = tolerances[self.dtype]
        if self.dtype == torch.float32:
            # TF32 convolutions have three correct digits, and the check needs four.
            torch.backends.cudnn.allow_tf32 = False

    @property
    @abstractmethod
    def step_count(self) -> int:
        """The number of times that `measure` calls `steps.advance`."""

    @abstractmethod
    def measure(self, steps: Steps) -> Iterator[list[Row]]:
        """Yields the rows of each group."""

    def prepare(self) -> dict[str, Any]:
        """Entries of the record that are measured before all groups."""
        return {"tolerance": self.tolerance}

    def summary(self, results: list[Row]) -> dict[str, Any]:
        """Entries of the record that are computed from the results."""
        return {}

    def described(self) -> dict[str, Any]:
        """The configuration as the record stores it."""
        return asdict(self.config)

    def rounds(self, clocks: Iterable[Clock]) -> int:
        """The number of rounds for a group timed by these clocks."""
        return sum(sum(clock.rounds(self.config.warmup, self.config.repeats)) for clock in clocks)

    def note_errors(self, row: Row, errors: Mapping[str, float], checked: Sequence[str] | None = None) -> None:
        """Stores the errors in the row, and marks it as wrong if a checked error (default: all) is too large."""
        judged = errors if checked is None else {name: errors[name] for name in checked}
        row.update(errors=correctness.finite(errors), wrong=correctness.worst(judged, self.tolerance))


class Group:
    """The rows of a group by name; one of them is the base of all ratios, or each row has its own base.

    `wrong` of a row says why its results are wrong, `failed` why it did not run; both are None otherwise. `about`
    describes the group in the progress bar.
    """

    def __init__(
        self,
        benchmark: Benchmark[Any],
        base: str | Mapping[str, str],
        rows: Mapping[str, Row],
        steps: Steps,
        about: str,
    ):
        self.benchmark, self.rows, self.steps, self.about = benchmark, rows, steps, about
        self.bases = dict.fromkeys(rows, base) if isinstance(base, str) else base
        for row in rows.values():
            row.update(wrong=None, failed=None)

    def skip(self, sentence: str) -> list[Row]:
        """Marks all rows as skipped, which is not an error; returns them."""
        for row in self.rows.values():
            row["skipped"] = sentence
        return list(self.rows.values())

    def attempt_all(self, action: Callable[[], None]) -> None:
        """Runs the action; an exception marks every row without a problem as failed."""
        try:
            action()
        except Exception as error:  # A device may fail anywhere.
            for row in self.rows.values():
                if not (row["wrong"] or row["failed"]):
                    row["failed"] = short_error(error)

    def make(self, build: Callable[[Row], Made]) -> dict[str, Made]:
        """The result of `build` for each row; rows for which it fails are marked and left out."""
        made: dict[str, Made] = {}
        for name, row in self.rows.items():
            self.steps.say(f"{self.about}: {name}")
            built = self.attempt(name, functools.partial(build, row))
            made.update({} if built is None else {name: built})
            self.steps.advance()
        self.steps.say(f"{self.about}: timing")
        return made

    def attempt(self, name: str, action: Callable[[], Made]) -> Made | None:
        """The result of the action; None after an exception, such as out of memory, which marks the row as failed."""
        try:
            return action()
        except Exception as error:  # Compilers raise any type.
            self.rows[name]["failed"] = short_error(error)
            return None

    def valid(self, calls: Mapping[str, Call]) -> dict[str, Call]:
        """The calls of rows that are neither wrong nor failed, and whose base rows are neither."""
        rows = self.rows
        good = {name: call for name, call in calls.items() if not (rows[name]["wrong"] or rows[name]["failed"])}
        for name in good:
            if self.bases[name] not in good:
                rows[name]["failed"] = f"{self.bases[name]}, the base of its ratios, was not timed"
        return {name: call for name, call in good.items() if self.bases[name] in good}

    def measure_memory(self, forward: Mapping[str, Call], training: Mapping[str, Call]) -> None:
        """Measures and stores the memory of every row."""
        meter = self.benchmark.meter
        for name in self.valid(training):
            weigh = functools.partial(meter.memory_mib, forward[name], training[name])
            self.note_memory(name, self.attempt(name, weigh))

    def note_memory(self, name: str, mib: float | None) -> None:
        entry, base = self.benchmark.meter.memory_name, self.rows[self.bases[name]]
        if mib is not None:
            self.rows[name][entry] = mib
            self.rows[name]["memory_ratio"] = mib / base[entry] if entry in base else None

    def time(self, calls: Mapping[str, Call], entry: str, clocks: Sequence[Clock] | None = None) -> None:
        """Stores times and launches under `entry` of every row; `clocks` defaults to those of the meter."""
        # The main clock runs last, when the others have warmed up the device.
        for clock in reversed(clocks or self.benchmark.meter.clocks):
            for name, result in self._read(clock, calls).items():
                place = self.rows[name].setdefault(entry, {})
                place.update({f"{clock.prefix}{key}": value for key, value in result.items()})
        self._count_launches(calls, entry)

    def _read(self, clock: Clock, calls: Mapping[str, Call]) -> dict[str, dict[str, Any]]:
        stopwatches: dict[str, Stopwatch] = {}
        for name, call in self.valid(calls).items():
            stopwatch = self.attempt(name, functools.partial(clock.start, call))
            stopwatches.update({} if stopwatch is None else {name: stopwatch})
        config = self.benchmark.config
        ready = {name: stopwatch for name, stopwatch in stopwatches.items() if self.bases[name] in stopwatches}
        if not ready:
            return {}
        times = time_rounds(ready, *clock.rounds(config.warmup, config.repeats), self.steps.advance)
        return summarize(times, self.bases)

    def _count_launches(self, calls: Mapping[str, Call], entry: str) -> None:
        counts = {name: self.benchmark.meter.launches(call) for name, call in self.valid(calls).items()}
        for name, count in counts.items():
            if count is not None:
                ratio = count / (counts[self.bases[name]] or 1)
                self.rows[name][entry] |= {"launches": count, "launches_ratio": ratio}


def short_error(error: Exception) -> str:
    """The type of an error and the first line of its message."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
    return f"{type(error).__name__}: {first}"


def complaints(rows: Sequence[Row]) -> list[str]:
    """An error message per row that was not timed."""
    sentences = []
    for row in rows:
        if row["wrong"]:
            sentences.append(f"{title(row)} is wrong and was not timed: {row['wrong']}")
        elif row["failed"]:
            sentences.append(f"{title(row)} failed and was not timed: {row['failed']}")
    return sentences


def title(row: Row) -> str:
    """The entries that identify a row: those before `wrong`; a flag is shown by its name if it is true."""
    named = {name: row[name] for name in list(row)[: list(row).index("wrong")]}
    return ", ".join(name if value is True else str(value) for name, value in named.items() if value is not False)


class Session:
    """Runs one benchmark and writes its record after every group."""

    def __init__(self, benchmark: Benchmark[Any], json: Path | None, plot: Path | None, console: Console | None = None):
        self.benchmark, self.json, self.plot = benchmark, json, plot
        lasting, self.output = resilient_console(f"dcnet bench {benchmark.name}")
        self.console = console or lasting
        self.record: dict[str, Any] = {"benchmark": benchmark.name, "complete": False, "config": benchmark.described()}

    def run(self) -> int:
        """Returns the exit code: 1 if a row is wrong or failed, 130 after an interruption."""
        try:
            self._measure()
        except KeyboardInterrupt:
            return self._stop()
        for table in terminal_tables(self.record):
            self.console.print(table)
        self._write_all()
        # A row that is skipped, as for lack of memory, is not an error.
        skips = dict.fromkeys(row["skipped"] for row in self.record["results"] if row.get("skipped"))
        problems = complaints(self.record["results"])
        for sentence in (*skips, *problems):
            self._report(sentence)
        return FAILED if problems else self.output.code

    def _report(self, sentence: str) -> None:
        print(f"dcnet bench {self.benchmark.name}: {sentence}", file=sys.stderr)

    def _measure(self) -> None:
        torch.set_num_threads(self.benchmark.config.threads)
        self.record |= {"commit": commit(), "environment": environment(), "results": []}
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self.console) as progress:
            steps = Steps(progress, self.benchmark.step_count)
            self.record |= self.benchmark.prepare()
            for rows in self.benchmark.measure(steps):
                self.record["results"] += rows
                self._write()
                if not self.console.is_terminal and not all(row.get("skipped") for row in rows):
                    # The progress bar is shown only at the end.
                    self.console.print(steps.status(), highlight=False, soft_wrap=True)
        self.record |= {"complete": True, **self.benchmark.summary(self.record["results"])}

    def _stop(self) -> int:
        """Writes the rows measured before the interruption. Returns the exit code."""
        measured = self.record.get("results", [])
        said = "nothing was measured"
        if measured:
            said = f"{len(measured)} results were measured"
            self.record |= self.benchmark.summary(measured)
            self._write()
            said += f" and are in {self.json}" if self.json else " and are lost without --json"
        self._report(f"interrupted: {said}")
        return INTERRUPTED

    def _write(self) -> None:
        if self.json:
            write_json(self.json, self.record)

    def _write_all(self) -> None:
        self._write()
        if self.plot:
            drawing.save(speed_plots.benchmark_plot(self.record), self.plot)
        for path in (self.json, self.plot):
            if path:
                self.console.print(f"wrote {path}", soft_wrap=True, highlight=False)
