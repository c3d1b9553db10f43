"""The fused convolution: the order of its passes, which of them run concurrently, and the cache of compiled ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcnet.kernels.depthwise import Depthwise
from dcnet.kernels.direct import DirectBackward, DirectForward, can_run
from dcnet.kernels.epilogues import Epilogue, FusedGradient, FusedOutput, gradient_form, output_form
from dcnet.kernels.fused_layer import FusedLayer, Gradients, Rest, dense, keeps_output, state_memory
from dcnet.kernels.launch import (
    NO_FORK,
    Memory,
    Place,
    SideStream,
    aligned,
    capturing,
    device_guard,
    kinds_of,
    raw_stream,
    side_stream,
)
from dcnet.kernels.passes import BATCH_MEAN, IN_PLACE, NO_MEAN, NO_UPDATE, RETURNED, RUNNING_MEAN, Passes, Settings
from dcnet.kernels.plan import Plan, Window, plan_of


class Convolution(FusedLayer):
    """Forward and backward pass of one fused convolution, compiled for one operator, shape, layout and dtype.

    The backward pass needs one tensor of state: the norms [group, image, *out]; the channel table, with a row for each
    constant and for a, b and ||w||; and the mean norm, followed by the next running mean and its count.
    """

    passes: Passes

    def __init__(self, plan: Plan, window: Window, settings: Settings):
        self.plan, self.window, self.passes = plan, window, Passes(plan, window, settings)
        passes, filters = self.passes, window.filters
        self.state = state_memory(plan, window)
        # Every row is a patch: there are no squares and factors of pixels.
        places = 0 if passes.of_rows else passes.places
        self.forward_scratch = Memory(places, passes.norm_sums)
        sums = passes.back_programs * passes.rows * filters
        self.backward_scratch = Memory(passes.slices * passes.patches, sums, passes.mean_sums, places)
        self.output_epilogue, self.gradient_epilogue = Epilogue(), Epilogue()
        self.gather()

    def gather(self) -> None:
        """Gathers once what every pass needs."""
        self.keeps_output = keeps_output(self.plan, self.window, self.passes.settings.has_bias)
        self._direct_forward: DirectForward | None = None
        self._direct_backward: dict[bool, DirectBackward] = {}

    def forward(self, call: Call, keep: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The output, and the inputs of the backward pass: inner products, unit filters and state.

        The output takes the memory of the inner products if the backward pass does not need them, or without `keep`.
        """
        found = None if self._direct_forward is None else self._direct_forward(call, keep)
        return self._forward(call, keep) if found is None else found

    def _forward(self, call: Call, keep: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, w, bias, constants, running, tracked, *_ = self.laid_out(call)
        passes, device, ok = self.passes, x.device, aligned(x, w, bias, running, tracked, *constants)
        with device_guard(x):
            fused = self._fused_output(call) if ok else None
            state, scratch = self.state.allocate(device), self.forward_scratch.allocate(device)
            norm, table, kept = self.state.places(state)
            squares, sums = self.forward_scratch.places(scratch)
            unit = torch.empty(w.shape, dtype=x.dtype, device=device, memory_format=self.window.format)
            stream = raw_stream(device)
            filters = (w, unit, table, self.plan.stored(constants))
            side = self._prepare_input(x, (norm, squares, sums), filters, stream, ok)
            means = (sums, table if running is None else running, table if tracked is None else tracked)
            offset, keep = table if bias is None else bias, keep and not self.keeps_output
            if fused is not None:
                side.join()
                output = product = fused(x, unit, norm, table, *means, kept, stream=stream)
            else:
                product = self.window.convolve(x, unit)
                side.join()
                output = torch.empty_like(product) if keep else product
                passes.apply(product, norm, table, offset, *means, output, kept, stream=stream, aligned=ok)
        if running is not None and passes.settings.update == IN_PLACE:
            torch.autograd.graph.increment_version([value for value in (running, tracked) if value is not None])
        if self._direct_forward is None and can_run(passes.forward_launches):
            self._direct_forward = DirectForward(self)
        return output, product, unit, state

    def _prepare_input(
        self, x: Tensor, places: tuple[Place, Place, Place], filters: tuple[Any, ...], stream: int | None, ok: bool
    ) -> SideStream:
        """Computes the norms and normalizes the filters; norms with a separate launch run concurrently.

        `places` has the places of the norms, of the squares of pixels, and of the partial sums of the norms.
        """
        passes, device, (norm, squares, sums) = self.passes, x.device, places
        if passes.of_rows:
            passes.prepare_rows(x, norm, sums, *filters, stream=stream, aligned=ok)
            return NO_FORK
        passes.prepare(x, squares, *filters, stream=stream, aligned=ok)
        with side_stream(device) as side:
            passes.norms(squares, norm, sums, stream=raw_stream(device), aligned=True)
        return side

    def backward(
        self,
        call: Call,
        gradient: Tensor,
        saved: tuple[Tensor, Tensor, Tensor],
        from_output: bool,
        needs_input: bool,
        needs_weight: bool,
    ) -> Gradients:
        """The gradients of input, filters, bias and stored constants.

        `saved` holds inner products, unit filters and state; inner products are recomputed if they are empty. With
        `from_output`, `saved` has the output in place of the inner products.
        """
        if from_output in self._direct_backward and needs_input and needs_weight:
            found = self._direct_backward[from_output](call, gradient, saved)
            if found is not None:
                return found
        call, layout, (products, unit, state) = self.laid_out(call), self.window.format, saved
        gradient, unit = gradient.contiguous(memory_format=layout), unit.contiguous(memory_format=layout)
        with device_guard(call.x):
            recompute = not products.numel()
            products = self.window.convolve(call.x, unit) if recompute else products.contiguous(memory_format=layout)
            given = (call, gradient, (products, unit, state), from_output)
            if needs_input and self.gradient_epilogue.may_choose(call.x):
                run = functools.partial(self._backward, *given, True, needs_weight)
                self.gradient_epilogue.choose(gradient_form(self.passes), FusedGradient, lambda: run()[:1])
            return self._backward(*given, needs_input, needs_weight)

    def _backward(
        self,
        call: Call,
        gradient: Tensor,
        saved: tuple[Tensor, Tensor, Tensor],
        from_output: bool,
        needs_input: bool,
        needs_weight: bool,
    ) -> Gradients:
        x, w, bias, constants, *_ = call
        products, unit, state = saved
        passes, device, ok = self.passes, x.device, aligned(gradient, x, w, bias, products, *constants)
        norm, table, kept = self.state.places(state)
        scratch = self.backward_scratch.allocate(device)
        norm_gradient, sums, mean_sums, factor = self.backward_scratch.places(scratch)
        product_gradient, stream, back = torch.empty_like(gradient), raw_stream(device), passes.back[from_output]
        outs = (product_gradient, norm_gradient, sums, mean_sums)
        back(gradient, products, norm, table, kept, *outs, stream=stream, aligned=ok)
        by_norm = (norm, norm_gradient, mean_sums)
        spread = None if passes.of_rows else functools.partial(passes.spread, *by_norm, factor, aligned=True)
        finish = functools.partial(self.finish, w, bias, constants, (table, kept, sums), ok)

        def add(gradient: Tensor) -> None:
            if passes.of_rows:
                passes.add_rows(gradient, x, *by_norm, stream=stream, aligned=ok)
            else:
                passes.add(gradient, x, factor, stream=stream, aligned=ok)

        steps = Steps(spread, finish, add)
        fused = self.gradient_epilogue.ready(x) if needs_input and ok else None
        if fused is not None:
            steps = steps._replace(fused=functools.partial(fused, product_gradient, x, unit, factor))
        input_gradient, rest = self.convolve_gradients((product_gradient, x, unit), steps, needs_input, needs_weight)
        if from_output not in self._direct_backward and can_run(passes.backward_launches(from_output)):
            self._direct_backward[from_output] = DirectBackward(self, back)
        return (input_gradient, *rest)

    def convolve_gradients(
        self, tensors: tuple[Tensor, Tensor, Tensor], steps: Steps, needs_input: bool, needs_weight: bool
    ) -> tuple[Tensor, Rest]:
        """The gradient of the input, and those of filters, bias and constants.

        `tensors` are the gradient of the inner products, the input and the normalized filters. In a captured graph, the
        gradients of filters and constants are computed concurrently with that of the input.
        """
        device, convolved = tensors[1].device, functools.partial(self.window.convolve_backward, *tensors)
        if steps.fused is not None:
            return self._fused_gradients(tensors, steps, steps.fused, needs_weight)
        if not capturing(device):
            # One call of torch instead of two, since host time is the limit.
            input_gradient, unit_gradient = convolved(needs_input, needs_weight)
            if needs_input:
                steps.spread_now(device)
                steps.add(input_gradient)
            return input_gradient, steps.finish(unit_gradient if needs_weight else None, raw_stream(device))
        with side_stream(device) as side:
            if needs_input:
                steps.spread_now(device)
            spread_done = side.mark()
            unit_gradient = convolved(False, needs_weight)[1]
            rest = steps.finish(unit_gradient if needs_weight else None, raw_stream(device))
        input_gradient = convolved(needs_input, False)[0]
        if needs_input:
            side.wait(spread_done)
            steps.add(input_gradient)
        side.join()
        return input_gradient, rest

    def _fused_gradients(
        self,
        tensors: tuple[Tensor, Tensor, Tensor],
        steps: Steps,
        fused: Callable[[], Tensor],
        needs_weight: bool,
    ) -> tuple[Tensor, Rest]:
        """As `convolve_gradients`, if the data gradient adds the part of the norms, which must be known before."""
        device = tensors[1].device
        with side_stream(device) as side:
            unit_gradient = self.window.convolve_backward(*tensors, False, needs_weight)[1]
            rest = steps.finish(unit_gradient if needs_weight else None, raw_stream(device))
        steps.spread_now(device)
        input_gradient = fused()
        side.join()
        return input_gradient, rest

    def _fused_output(self, call: Call) -> FusedOutput | None:
        """The convolution whose epilogue computes the output, if this is faster; the first call measures it."""
        if self.output_epilogue.may_choose(call.x):
            form = output_form(call.operator, self.passes, call.keeps_output)
            # Calls that measure must not change the running mean.
            running, tracked = (None if mean is None else mean.clone() for mean in (call.running, call.tracked))
            copied = call._replace(running=running, tracked=tracked)
            build = functools.partial(FusedOutput, self.passes)
            self.output_epilogue.choose(form, build, lambda: self._forward(copied)[:1])
        return self.output_epilogue.ready(call.x)


class Steps(NamedTuple):
    """Steps of a backward pass around the gradients of the plain convolution.

    `spread` computes the gradient of the norms for every pixel, unless `add` does it; `finish` those of filters, bias
    and constants. `add` adds the part of the norms to the gradient of the input. `fused` computes the gradient of the
    input with that part.
    """

    spread: Callable[..., None] | None
    finish: Callable[[Tensor | None, int | None], Rest]
    add: Callable[[Tensor], None]
    fused: Callable[[], Tensor] | None = None

    def spread_now(self, device: torch.device) -> None:
        """Launches `spread` on the current stream."""
        if self.spread is not None:
            self.spread(stream=raw_stream(device))


def mean_kind(decay: float | None, running: Tensor | None, training: bool) -> int:
    """The code for the mean norm in use; see `Settings`."""
    if decay is None:
        return NO_MEAN
    return BATCH_MEAN if training or running is None else RUNNING_MEAN


_compiled: dict[Any, Convolution | Depthwise] = {}

# Bounds the cache, since every new image size adds an entry.
MOST_COMPILED = 4096


class Call(NamedTuple):
    """The arguments of a fused convolution; `constants` are the learned ones, as a layer stores them."""

    x: Tensor
    w: Tensor
    bias: Tensor | None
    constants: Sequence[Tensor]
    running: Tensor | None
    tracked: Tensor | None
    operator: str
    eps: float
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int
    mean: int

    @property
    def plan(self) -> Plan:
        return plan_of(self.operator)

    @property
    def window(self) -> Window:
        return Window.of(self.x, self.w, self.stride, self.padding, self.dilation, self.groups)

    @property
    def keeps_output(self) -> bool:
        """Whether the backward pass gets the output; see the function."""
        return keeps_output(self.plan, self.window, self.bias is not None)

    def convolution(self, in_place: bool) -> Convolution | Depthwise:
        """The compiled convolution for such tensors; it updates the running mean `in_place`, or returns the new one."""
        x, w = self.x, self.w
        tensors = (x, w, self.bias, self.running, self.tracked, *self.constants)
        layout = (x.shape, x.stride(), w.shape, w.stride())
        numbers = (self.eps, tuple(self.stride), tuple(self.padding), tuple(self.dilation), self.groups, self.mean)
        key = (self.plan, kinds_of(*tensors), layout, numbers, in_place)
        if key not in _compiled:
            while len(_compiled) >= MOST_COMPILED:
                _compiled.pop(next(iter(_compiled)))
            _compiled[key] = self._compile(in_place)
        return _compiled[key]

    def _compile(self, in_place: bool) -> Convolution | Depthwise:
        update = NO_UPDATE if self.running is None or self.mean != BATCH_MEAN else IN_PLACE if in_place else RETURNED
        tensors = (self.x.device, self.x.dtype, dense(self.w).stride(), self.bias is not None)
        settings = Settings(*tensors, self.eps, self.mean, update, counted=self.tracked is not None)
        return (Depthwise if self.window.depthwise else Convolution)(self.plan, self.window, settings)
