"""Calls that are measured together, in turns; one that fails says so in its row, and the others go on."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from dcnet.bench.benchmark import Benchmark, Row, Steps
from dcnet.bench.meter import Call, Clock
from dcnet.bench.timing import Stopwatch, summarize, time_rounds

Made = TypeVar("Made")


class Group:
    """The rows of a group by their names, of which one is the base of all ratios.

    A row has `wrong` if its results are, and `failed` if it could not be run; either as one sentence, or None.
    """

    def __init__(self, benchmark: Benchmark, base: str, rows: Mapping[str, Row], steps: Steps):
        self.benchmark, self.base, self.rows, self.steps = benchmark, base, rows, steps
        for row in rows.values():
            row.update(wrong=None, failed=None)

    def attempt(self, name: str, action: Callable[[], Made]) -> Made | None:
        """What the action gives, unless it fails: for lack of memory, or for what a compiler or a capture cannot do."""
        try:
            return action()
        except Exception as error:  # Compilers raise what they like.
            self.rows[name]["failed"] = f"{type(error).__name__}: {first_line(str(error))}"
            return None

    def sound(self, calls: Mapping[str, Call]) -> dict[str, Call]:
        """The calls of those rows that nothing speaks against; none where the base is not among them."""
        good = {name: call for name, call in calls.items() if not self._spoiled(name)}
        if self.base in good:
            return good
        for name in good:
            self.rows[name]["failed"] = f"{self.base}, which it is compared with, is not timed either"
        return {}

    def _spoiled(self, name: str) -> bool:
        return bool(self.rows[name]["wrong"] or self.rows[name]["failed"])

    def weigh(self, forward: Mapping[str, Call], training: Mapping[str, Call]) -> None:
        """Notes the memory of every row."""
        meter = self.benchmark.meter
        for name in self.sound(training):
            weigh = functools.partial(meter.memory_mib, forward[name], training[name])
            self.note_memory(name, self.attempt(name, weigh))

    def note_memory(self, name: str, mib: float | None) -> None:
        entry, base = self.benchmark.meter.memory_name, self.rows[self.base]
        if mib is not None:
            self.rows[name][entry] = mib
            self.rows[name]["memory_ratio"] = mib / base[entry] if entry in base else None

    def time(self, calls: Mapping[str, Call], entry: str, clocks: Sequence[Clock] | None = None) -> None:
        """Notes under `entry` of every row the times by the clocks, all unless some are given, and the launches."""
        # The clock that counts comes last: the others leave the device warm for it.
        for clock in reversed(clocks or self.benchmark.meter.clocks):
            self._note(entry, clock.prefix, self._read(clock, calls))
        self._count_launches(calls, entry)

    def _read(self, clock: Clock, calls: Mapping[str, Call]) -> dict[str, dict[str, Any]]:
        stopwatches: dict[str, Stopwatch] = {}
        for name, call in self.sound(calls).items():
            stopwatch = self.attempt(name, functools.partial(clock.start, call))
            stopwatches.update({} if stopwatch is None else {name: stopwatch})
        config = self.benchmark.config
        if self.base not in stopwatches:
            return {}
        times = time_rounds(stopwatches, *clock.rounds(config.warmup, config.repeats), self.steps.advance)
        return summarize(times, self.base)

    def _note(self, entry: str, prefix: str, results: Mapping[str, Mapping[str, Any]]) -> None:
        for name, result in results.items():
            place = self.rows[name].setdefault(entry, {})
            place.update({f"{prefix}{key}": value for key, value in result.items()})

    def _count_launches(self, calls: Mapping[str, Call], entry: str) -> None:
        counts = {name: self.benchmark.meter.launches(call) for name, call in self.sound(calls).items()}
        for name, count in counts.items():
            if count is not None:
                self.rows[name][entry] |= {"launches": count, "launches_ratio": count / (counts[self.base] or 1)}


def first_line(text: str) -> str:
    """The first line that says something."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")


def complaints(rows: Sequence[Row]) -> list[str]:
    """One sentence for every row that was not timed."""
    sentences = []
    for row in rows:
        if row["wrong"]:
            sentences.append(f"{title(row)} is wrong, so it is not timed: {row['wrong']}")
        elif row["failed"]:
            sentences.append(f"{title(row)} cannot be run, so it is not timed: {row['failed']}")
    return sentences


def skips(rows: Sequence[Row]) -> list[str]:
    """One sentence for every row that was left out for lack of memory, which is no fault of its own."""
    return [row["skipped"] for row in rows if row.get("skipped")]


def title(row: Row) -> str:
    """What tells the row from others: the entries before its results, of which it is enough to name what is true."""
    named = {name: row[name] for name in list(row)[: list(row).index("wrong")]}
    words = [name if value is True else str(value) for name, value in named.items() if value is not False]
    return ", ".join(words)
