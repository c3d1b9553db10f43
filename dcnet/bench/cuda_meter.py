"""GPU measurements: CUDA graph replays, calls from the host, launches and peak memory."""

import gc
import json
import math
import tempfile
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from dcnet.bench.meter import MIB, Call, Clock, Meter, Stopwatch
from dcnet.modes import search_convolutions

WARMUP_CALLS = 3
# A graph is replayed for this long per reading, since CUDA events have a resolution of about a microsecond.
READING_MS = 5.0
MOST_REPLAYS = 100
HOST_CALLS = 20
HOST_ROUNDS = 5
# Categories of launches in the trace of the profiler.
LAUNCHED = ("kernel", "gpu_memcpy", "gpu_memset")


class Cuda(Meter):
    """Times graph replays (without the host) and calls from the host; counts launches and peak memory."""

    device = "cuda"
    memory_name = "peak_mib"
    copied_bytes = 1024 * MIB
    matrix_side = 8192

    def __init__(self) -> None:
        search_convolutions(all_plans=True)
        # One stream for everything: autograd runs backward on the stream of the forward pass, which is captured.
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
        """Peak allocated memory during one training call, including memory allocated before."""
        training()
        gc.collect()
        return self.peak_bytes(training) / MIB

    def launches(self, call: Call) -> int | None:
        return count_launches(call)

    def allocated_mib(self) -> float:
        return self.held_bytes() / MIB

    def free(self) -> None:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def free_bytes(self) -> float:
        return torch.cuda.mem_get_info()[0]

    def held_bytes(self) -> int:
        return torch.cuda.memory_allocated()

    def peak_bytes(self, call: Call) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()


class Replay:
    """A stopwatch that replays a call captured in a CUDA graph."""

    def __init__(self, call: Call, stream: torch.cuda.Stream):
        # The graph uses the memory of the inputs and outputs of the call, so both must stay alive.
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
        # The first replay also uploads the graph.
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
    """Times a series of calls without a graph, from the first launch to the end of the last kernel."""

    def read() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - start) / HOST_CALLS

    return read


def time_by_events(call: Call) -> Stopwatch:
    """Times one call without a graph, from its first launch to the end of its last kernel."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def read() -> float:
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    return read


def count_launches(call: Call) -> int:
    """The number of kernels, copies and fills of one call."""
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
