"""Training steps of heads by number of classes: time and peak memory, and lower bounds of both."""

import copy
import functools
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dcnet.bench import correctness
from dcnet.bench.benchmark import Benchmark, Config, Row, Steps, short_error
from dcnet.bench.cluster_estimate import Cluster, estimates
from dcnet.bench.head_steps import LINEAR, SAMPLED, GroupOfOne, HeadStep, Size, make_step
from dcnet.bench.meter import GIB, MIB, Meter, out_of_memory
from dcnet.bench.shapes import Ceilings

# Above this number of classes the check against float64 would need too much memory.
CHECKED_CLASSES = 10_000
LEAST_ROUNDS = 3
WARM = Size(classes=100, batch=8, features=8, itemsize=4)


@dataclass(frozen=True, kw_only=True)
class HeadConfig(Config):
    """Each head is timed for each number of classes and each batch size, for `seconds` each."""

    heads: list[str]
    classes: list[int]
    batches: list[int]
    features: int
    dtype: str
    margin: str
    sample: float
    seconds: float
    gpus: int | None = None
    link_gb_per_s: float = 50.0


class HeadBenchmark(Benchmark[HeadConfig]):
    """A group per number of classes and batch size; heads are timed one by one, as each may fill the memory."""

    name = "heads"

    def __init__(self, config: HeadConfig, meter: Meter):
        super().__init__(config, meter, config.dtype, correctness.NETWORK_TOLERANCES)

    @functools.cached_property
    def ceilings(self) -> Ceilings:
        return self.meter.ceilings(self.dtype)

    @property
    def step_count(self) -> int:
        return len(self.config.classes) * len(self.config.batches) * len(self.config.heads)

    def described(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self.config).items() if name != "operators"}

    def prepare(self) -> dict[str, Any]:
        found = {**super().prepare(), "ceilings": asdict(self.ceilings)}
        self.meter.free()
        free = self.meter.free_bytes()
        return {**found, "free_gib": free / GIB if math.isfinite(free) else None}

    def measure(self, steps: Steps) -> Iterator[list[Row]]:
        with GroupOfOne(self.meter.device):
            for head in self.config.heads:
                # Memory that libraries allocate in their first call is not counted for the head.
                self._make(head, WARM)()
            for batch in self.config.batches:
                for classes in self.config.classes:
                    yield self._measure_group(self._size(classes, batch), steps)

    def summary(self, results: list[Row]) -> dict[str, Any]:
        config = self.config
        if config.gpus is None:
            return {}
        cluster, size = Cluster(config.gpus, config.link_gb_per_s), self._size(0, 0)
        return {"estimates": estimates(results, cluster, size, config.sample)}

    def _size(self, classes: int, batch: int) -> Size:
        return Size(classes, batch, self.config.features, self.dtype.itemsize)

    def _make(self, head: str, size: Size) -> HeadStep:
        return make_step(head, size, self.config.margin, self.config.sample, self.dtype, self.meter.device)

    def _measure_group(self, size: Size, steps: Steps) -> list[Row]:
        rows = []
        for head in self.config.heads:
            steps.say(f"{head}, {size.classes:,} classes, batch {size.batch}")
            rows.append(self._row(head, size))
            steps.advance()
        base = next((row["training"]["ms"] for row in rows if row["head"] == LINEAR and "training" in row), None)
        for row in [row for row in rows if "training" in row]:
            row["training"]["ratio"] = row["training"]["ms"] / base if base else None
        return rows

    def _row(self, head: str, size: Size) -> Row:
        share = self.config.sample if head == SAMPLED else 1.0
        row: Row = {"head": head, "classes": size.classes, "batch": size.batch, "wrong": None, "failed": None}
        row |= {"floor_ms": size.floor_ms(self.ceilings, share), "floor_mib": size.floor_bytes(share) / MIB}
        needed, usable = size.needed_bytes(head, share), self.meter.usable_share * self.meter.free_bytes()
        row |= {"skipped": None, "needed_mib": needed / MIB}
        if needed > usable:
            row["skipped"] = skipped(row, f"needs about {needed / GIB:.1f} GiB of {usable / GIB:.1f} GiB")
            return row
        try:
            self._measure_row(row, size)
        except Exception as error:  # Allocators and libraries raise any type.
            note_error(row, error, usable)
        self.meter.free()
        return row

    def _measure_row(self, row: Row, size: Size) -> None:
        self.meter.free()
        before = self.meter.held_bytes()
        step = self._make(row["head"], size)
        if size.classes <= CHECKED_CLASSES:
            self.note_errors(row, {"loss": loss_error(step)})
        if row["wrong"]:
            return
        step()
        highest = self.meter.peak_bytes(step)
        row["peak_mib"] = None if highest is None or before is None else (highest - before) / MIB
        row["training"] = self._timed(step)

    def _timed(self, step: HeadStep) -> dict[str, Any]:
        """Median and quartiles of at most `repeats` steps within `seconds`."""
        stopwatch, times = self.meter.call_clock.start(step), list[float]()
        # Two steps ran already: one to warm up and one to measure memory.
        for _ in range(self.config.warmup - 2):
            stopwatch()
        least, end = min(LEAST_ROUNDS, self.config.repeats), time.perf_counter() + self.config.seconds
        while len(times) < least or (len(times) < self.config.repeats and time.perf_counter() < end):
            times.append(stopwatch())
        low, median, high = statistics.quantiles(times, n=4, method="inclusive")
        return {"ms": median, "ms_quartiles": [low, high], "rounds": len(times)}


def skipped(row: Row, why: str) -> str:
    """The message for a skipped head."""
    return f"{row['head']} with {row['classes']:,} classes and a batch of {row['batch']} is skipped: it {why}"


def note_error(row: Row, error: Exception, usable: float) -> None:
    """Marks the row as skipped if the head ran out of memory, and as failed otherwise."""
    row.pop("training", None)
    if out_of_memory(error):
        row["skipped"] = skipped(row, f"ran out of memory, with {usable / GIB:.1f} GiB free")
    else:
        row["failed"] = short_error(error)


def loss_error(step: HeadStep) -> float:
    """Relative error of the loss against float64, with the same random sample of classes."""
    exact = copy.deepcopy(step.head).double()
    losses = []
    for head, features in ((step.head, step.features), (exact, step.features.double())):
        torch.manual_seed(1)
        losses.append(head(features.detach(), step.labels).detach())
    return correctness.relative_error(*losses)
