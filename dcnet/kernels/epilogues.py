"""Passes of a fused convolution in the epilogue of its cuDNN kernels, where measurements show that this is faster."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dcnet.device_functions import Block, constexpr, device_function, tl
from dcnet.kernels import cudnn_graphs, plan_cache
from dcnet.kernels.cudnn_graphs import Form
from dcnet.kernels.device_helpers import channel_constants, keep_means, mean_norm, split
from dcnet.kernels.launch import Launch, Memory, Place, capturing, power_of_two
from dcnet.kernels.passes import PLACES, Passes
from dcnet.operator import Operator

# A graph must save this share of the time of the whole pass; smaller differences are noise.
SAVED = 0.03
# cuDNN compiles a plan in about half a second, and proposes the most promising ones first.
MOST_PLANS = 6
# Calls in one replay, and replays.
CALLS, REPLAYS = 5, 7
# The largest difference from the result of separate passes, which round twice, relative to the largest value.
LARGEST_DIFFERENCE = 2e-2

Run = Callable[[], Sequence[Tensor]]


class Epilogue:
    """A graph that replaces a convolution and the pass after it; None if passes are faster, or graphs unavailable.

    Only captured CUDA graphs use it: in eager mode it takes more host time than passes.
    """

    in_eager_mode = False

    def __init__(self) -> None:
        self.graph: Any = None
        self.chosen = False

    def may_choose(self, x: Tensor) -> bool:
        """Whether to choose now: once, and in eager mode."""
        if self.chosen or not _allowed() or capturing(x.device):
            return False
        self.chosen = True
        return cudnn_graphs.available(x)

    def choose(self, form: Form | None, build: Callable[[Form, str], Any], run: Run) -> None:
        """Takes the plan that was remembered for the graph, or the fastest one; `run` calls the whole pass."""
        if form is None:
            return
        try:
            choice, wanted = plan_cache.remembered(form.key), run()
            if not _is_choice(choice):
                choice = self._measured(form, build, run, wanted)
                plan_cache.remember(form.key, choice)
            # The call of a remembered plan also compiles kernels, which a capture could not.
            fits = choice["plan"] is not None and self._agrees(build(form, choice["plan"]), run, wanted)
            self.graph = self.graph if fits else None
        except Exception:
            # Anything may be missing: memory, a compiler, a plan of an older version. The passes need none of it.
            self.graph = None

    def _measured(
        self, form: Form, build: Callable[[Form, str], Any], run: Run, wanted: Sequence[Tensor]
    ) -> dict[str, Any]:
        """The fastest plan, or None for separate passes, and the microseconds of both."""
        passes = replay_us(run)
        best, least = None, passes * (1 - SAVED)
        for plan in cudnn_graphs.plans_of(form)[:MOST_PLANS]:
            try:
                found = replay_us(run) if self._agrees(build(form, plan), run, wanted) else least
            except Exception:
                # cuDNN proposes plans that it cannot build.
                continue
            if found < least:
                best, least = plan, found
        return {"plan": best, "us": None if best is None else round(least, 1), "passes_us": round(passes, 1)}

    def _agrees(self, graph: Any, run: Run, wanted: Sequence[Tensor]) -> bool:
        """Takes the graph, and calls it without a capture: whether it computes the same as separate passes."""
        self.graph, self.in_eager_mode = graph, True
        try:
            return _agree(run(), wanted)
        finally:
            del self.in_eager_mode

    def ready(self, x: Tensor) -> Any:
        """The graph, if the call that is being made should use it."""
        if self.graph is None or not (self.in_eager_mode or capturing(x.device)):
            return None
        return self.graph if _allowed() and cudnn_graphs.ready(x.device) else None


def _allowed() -> bool:
    """Whether torch may also search for fast convolutions, and results need not be deterministic."""
    settings = torch.backends.cudnn
    return settings.benchmark and not (settings.deterministic or torch.are_deterministic_algorithms_enabled())


def _is_choice(choice: Any) -> bool:
    return isinstance(choice, dict) and "plan" in choice and isinstance(choice["plan"], str | None)


def _agree(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Whether two results differ by rounding only; NaN differs."""
    pairs = [(a.float(), b.float()) for a, b in zip(found, wanted, strict=True) if b.numel()]
    return all(bool((a - b).abs().amax() <= LARGEST_DIFFERENCE * b.abs().amax()) for a, b in pairs)


def replay_us(run: Run) -> float:
    """Microseconds of one call in a CUDA graph: the median of several replays."""
    stream, graph, before = torch.cuda.Stream(), torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    stream.wait_stream(before)
    try:
        with torch.cuda.stream(stream):
            run()
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for _ in range(CALLS):
                    run()
            finally:
                graph.capture_end()
            times = [_replay_ms(graph) for _ in range(REPLAYS)]
    finally:
        # Also after an error: calls that are still running write to memory of the stream before.
        before.wait_stream(stream)
    return 1000 * statistics.median(times) / CALLS


def _replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    graph.replay()
    after.record()
    after.synchronize()
    return before.elapsed_time(after)


def output_form(operator: str, passes: Passes, keeps_output: bool) -> Form | None:
    """The graph that computes the output; None if cuDNN has no such epilogue.

    The angle must be the cosine and the layer unweighted. All channels share the constants, except for the radius of
    tanh. Inner products are not available, so the backward pass must not need them.
    """
    op, plan = Operator.parse(operator), passes.plan
    if not keeps_output or op.weighted or not op.angle.identity or not _one_group(passes):
        return None
    per_channel = [name for i, name in enumerate(plan.names) if plan.kinds[4 * i + 1]]
    if not per_channel:
        return Form("multiplied", passes.window, passes.settings.dtype)
    tanh = op.magnitude.parts[0].name == "tanh" and per_channel == ["radius"]
    return Form("tanh", passes.window, passes.settings.dtype) if tanh else None


def gradient_form(passes: Passes) -> Form | None:
    """The graph that computes the gradient of the input; None if cuDNN has no such epilogue."""
    supported = _one_group(passes) and not passes.of_rows
    return Form("added", passes.window, passes.settings.dtype) if supported else None


def _one_group(passes: Passes) -> bool:
    return passes.window.groups == 1 and passes.window.channels_last


class FusedOutput:
    """The output of a fused convolution: a small kernel for the factors of all patches, and a graph."""

    def __init__(self, passes: Passes, form: Form, plan: str):
        self.form, self.run, self.passes = form, cudnn_graphs.build(form, plan), passes
        self.launch = factor_launch(passes, form.kind == "tanh")
        self.memory = Memory(passes.patches, passes.window.filters)

    def __call__(self, x: Tensor, unit: Tensor, norm: Place, *given: Any, stream: int | None) -> Tensor:
        """`given` are the channel table, the sums of the norms, running mean and count, and the place of the mean."""
        *known, kept = given
        output, places = self.passes.window.empty_output(x), self.memory.places(self.memory.allocate(x.device))
        self.launch(norm, *known, *places, kept, stream=stream, aligned=True)
        sizes = self.form.sizes[2:-1]
        order = [places[0], norm, places[1]][: len(sizes)]
        self.run(x, unit, *(place.tensor().view(size) for place, size in zip(order, sizes, strict=True)), output)
        return output


class FusedGradient:
    """The gradient of the input of a fused convolution, with the part of the norms."""

    def __init__(self, form: Form, plan: str):
        self.form, self.run = form, cudnn_graphs.build(form, plan)

    def __call__(self, gradient: Tensor, x: Tensor, unit: Tensor, factor: Place) -> Tensor:
        input_gradient = torch.empty_like(x)
        self.run(gradient, unit, x, factor.tensor().view(self.form.sizes[3]), input_gradient)
        return input_gradient


def factor_launch(passes: Passes, tanh: bool) -> Launch:
    plan, settings = passes.plan, passes.settings
    numbers = (passes.norm_sums, passes.patches, plan.decay or 0.0, passes.patches, passes.window.filters)
    parts = {"MAGNITUDE": plan.magnitude, "COUNTS": plan.counts, "KNOWN": plan.known, "RELATIVE": plan.relative}
    means = {"MEAN": settings.mean, "UPDATE": settings.update, "COUNTED": settings.counted}
    sizes = {"SUMS": power_of_two(passes.norm_sums), "WIDTH": power_of_two(passes.window.filters), "BLOCK": PLACES}
    flags = {**parts, **means, **sizes, "TANH": tanh, "FAST": settings.fast}
    return Launch(factor_kernel, (-(-passes.patches // PLACES),), numbers, 4, **flags)


@device_function
def factor_kernel(
    norm: Block,
    table: Block,
    sums: Block,
    running: Block,
    tracked: Block,
    factor: Block,
    rate: Block,
    kept: Block,
    count: Block,
    of: Block,
    decay: Block,
    positions: Block,
    filters: Block,
    MAGNITUDE: constexpr,
    COUNTS: constexpr,
    KNOWN: constexpr,
    RELATIVE: constexpr,
    MEAN: constexpr,
    UPDATE: constexpr,
    COUNTED: constexpr,
    SUMS: constexpr,
    TANH: constexpr,
    WIDTH: constexpr,
    BLOCK: constexpr,
    FAST: constexpr,
) -> None:
    """Computes h(n) / n for every patch. If TANH, alpha / n for every patch, and 1 / radius for every channel."""
    mean = mean_norm(sums, running, count, of, MEAN, SUMS)
    if (MEAN > 0) & (tl.program_id(0) == 0):
        keep_means(mean, running, tracked, kept, decay, UPDATE, COUNTED)
    # All channels share the constants, except for the radius of TANH.
    own, _, _ = split(channel_constants(table, mean, 1, filters, KNOWN, RELATIVE, 1, 1), 0, COUNTS)
    position = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[:, None]
    there = position < positions
    n = tl.load(norm + position, mask=there, other=1.0)
    if TANH:
        tl.store(factor + position, own[0] / n, mask=there)
        if tl.program_id(0) == 0:
            of_channels = channel_constants(table, mean, filters, filters, KNOWN, RELATIVE, 1, WIDTH)
            column = tl.arange(0, WIDTH)[None, :]
            tl.store(rate + column, 1 / of_channels[1], mask=column < filters)
    else:
        tl.store(factor + position, MAGNITUDE(n, *own, FAST)[0] / n, mask=there)
