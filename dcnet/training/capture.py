"""A step as one CUDA graph: at small batches the launches of its thousand kernels take longer than the kernels."""

from collections.abc import Callable

import torch

from dcnet.data import BatchDraws

WARMUP = 3


class Captured:
    """Calls a function of a batch eagerly at first, then captures it, and from then on replays it.

    The first calls are steps like all others; a capture itself computes nothing.
    """

    def __init__(self, call: Callable[[BatchDraws], None]):
        self.call, self.calls = call, 0
        self.static: BatchDraws | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.side = torch.cuda.Stream()

    def __call__(self, draws: BatchDraws) -> None:
        if self.static is None:
            self.static = draws.clone()
        self.static.copy_(draws)
        self.calls += 1
        if self.calls <= WARMUP:
            self._warm_up()
            return
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.call(self.static)
        self.graph.replay()

    def _warm_up(self) -> None:
        """On a stream of its own, where libraries set up what must not be set up during a capture."""
        assert self.static is not None
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            self.call(self.static)
        torch.cuda.current_stream().wait_stream(self.side)
