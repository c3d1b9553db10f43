"""Measurements on a GPU: replays of CUDA graphs, calls from the host, launches and peak memory."""

import gc
import json
import math
import tempfile
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from dcnet.bench.meter import MIB, Call, Clock, Meter
from dcnet.bench.timing import Stopwatch

WARMUP_CALLS = 3
# A stopwatch replays a graph as often as it takes to run this long: the events have steps of about a microsecond.
READING_MS = 5.0
MOST_REPLAYS = 100
HOST_CALLS = 20
HOST_ROUNDS = 5
# What the device is asked to do, in the words of the trace that the profiler writes.
LAUNCHED = ("kernel", "gpu_memcpy", "gpu_memset")


class Cuda(Meter):
    """Graph replays, which leave the host out; the same calls from the host; launches, and peak memory."""

    device = "cuda"
    memory_name = "peak_mib"
    copied_bytes = 1024 * MIB
    matrix_side = 8192

    def __init__(self) -> None:
        torch.backends.cudnn.benchmark = True
        # One stream for all: a gradient that was first asked for on another one would lead the capture out of its own.
        self.stream = torch.cuda.Stream()

    @property
    def clocks(self) -> tuple[Clock, ...]:
        return Clock("", lambda call: Replay(call, self.stream)), Clock("host_", time_from_host, HOST_ROUNDS)

    @property
    def host_clock(self) -> Clock:
        return Clock("", time_from_host, HOST_ROUNDS)

    @property
    def call_clock(self) -> Clock:
        return Clock("", time_by_events)

    def memory_mib(self, forward: Call, training: Call) -> float:
        return peak_mib(training)

    def launches(self, call: Call) -> int | None:
        return count_launches(call)

    def allocated_mib(self) -> float:
        return torch.cuda.memory_allocated() / MIB

    def free(self) -> None:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class Replay:
    """A call captured in a CUDA graph: a stopwatch that gives the milliseconds of one replay."""

    def __init__(self, call: Call, stream: torch.cuda.Stream):
        # The graph reads and writes the memory of what the call holds and gives: both must live as long as it does.
        self.call = call
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUP_CALLS):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.result = call()
        self.count = 1
        # The first replay brings the graph to the device, too.
        self()
        self.count = min(MOST_REPLAYS, math.ceil(READING_MS / max(self(), 1e-3)))

    def __call__(self) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(self.count):
            self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / self.count


def time_from_host(call: Call) -> Stopwatch:
    """A stopwatch of calls without a graph, one after the other, from the first launch to the end of the last one."""

    def read() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - start) / HOST_CALLS

    return read


def time_by_events(call: Call) -> Stopwatch:
    """A stopwatch of one call without a graph, from its first launch to the end of its last one."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def read() -> float:
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    return read


def count_launches(call: Call) -> int:
    """The kernels, copies and fills of one call."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    return sum(event.get("cat") in LAUNCHED for event in events)


def peak_mib(call: Call) -> float:
    """The most memory that is taken at any moment of one call, with all that was taken before it."""
    call()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / MIB
