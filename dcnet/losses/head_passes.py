"""The passes of a fused head: eight launches, of which three are products of matrices.

Forward: norms, product with the weights, sums over the classes, loss. Backward: gradient of the products, in place,
two more products, and the part of the norms.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcnet.kernels import head_kernels as kernels
from dcnet.kernels.launch import Launch, Memory, aligned, device_guard, power_of_two, raw_stream
from dcnet.losses.cosine import EPS, HALF_EPS
from dcnet.losses.margins import as_margin

# Numbers per program in each pass, and the number of programs that keep a GPU busy.
ROW_TILE, SUMS, GRADIENTS, BUSY = 4096, 2048, (4, 512), 2048


class Settings(NamedTuple):
    """What a fused head computes: the spec of its margin, and numbers, as custom operations take them.

    Attributes:
        margin: the spec.
        numbers: scale, label smoothing, threshold of the filter, and three numbers of the annealing.
        kinds: kind of the scale, ignored label, reduction, whether there is a filter, kind of the share of the margin,
            and whether the step advances.
    """

    margin: str
    numbers: tuple[float, ...]
    kinds: tuple[int, ...]


def state_memory(count: int, classes: int) -> Memory:
    """Norms, 1 / ||w||, three numbers for each row, and the number of samples and the share."""
    return Memory(count, classes, 3 * count, 2)


class Passes:
    """The launches of a fused head for one size, and the layout of their intermediate results."""

    def __init__(self, settings: Settings, count: int, classes: int, size: int, half: bool):
        self.settings, self.count, self.classes, self.size = settings, count, classes, size
        self.scale, self.smoothing, self.threshold, *self.annealing = settings.numbers
        self.kind, self.ignored, self.reduction, filtered, self.share, advanced = settings.kinds
        self.filtered, self.advanced = bool(filtered), bool(advanced)
        self.state = state_memory(count, classes)
        self.parts = max(1, min(-(-BUSY // count), -(-classes // (2 * SUMS))))
        self.tile = {"ROWS": max(1, ROW_TILE // power_of_two(size)), "WIDTH": power_of_two(size)}
        self.blocks, self.weight_blocks = (-(-rows // self.tile["ROWS"]) for rows in (count, classes))
        numbers = (count, classes, size, self.blocks, HALF_EPS if half else EPS, EPS)
        self.norms = Launch(kernels.norms_kernel, (self.blocks + self.weight_blocks,), numbers, 4, **self.tile)
        self.sums, self.loss, self.products = self._sums(), self._loss(), self._products()
        self.by_needs: dict[tuple[bool, bool], Launch] = {}

    def _sums(self) -> Launch:
        block = min(SUMS, power_of_two(self.classes))
        span = -(-self.classes // (self.parts * block)) * block
        flags = {"SMOOTHED": self.smoothing > 0, "FILTERED": self.filtered, "BLOCK": block}
        numbers = (self.classes, span, self.scale, self.threshold)
        return Launch(kernels.class_sums_kernel, (self.count, self.parts), numbers, 4, SCALE=self.kind, **flags)

    def _loss(self) -> Launch:
        margin, width = as_margin(self.settings.margin), power_of_two(self.parts)
        block = min(power_of_two(self.count), max(1, ROW_TILE // width), 1024)
        sizes: dict[str, Any] = {"PARTS": width, "BLOCK": block, "MARGIN": margin.device}
        sizes |= {"NUMBERS": margin.device_numbers(), "SHARE": self.share, "ADVANCED": self.advanced}
        numbers = (self.count, self.classes, self.parts, self.ignored, self.scale, self.smoothing, *self.annealing)
        warps = 8 if block * width > 1024 else 4
        return Launch(kernels.loss_kernel, (1,), numbers, warps, SCALE=self.kind, REDUCTION=self.reduction, **sizes)

    def _products(self) -> Launch:
        rows, block = GRADIENTS[0], min(GRADIENTS[1], power_of_two(self.classes))
        flags = {"REDUCTION": self.reduction, "FILTERED": self.filtered, "ROWS": rows, "BLOCK": block}
        numbers = (self.count, self.classes, self.ignored, self.scale, self.smoothing, self.threshold)
        grid = (-(-self.classes // block), -(-self.count // rows))
        return Launch(kernels.products_gradient_kernel, grid, numbers, 4, SCALE=self.kind, **flags)

    def inputs(self, features: bool, weight: bool) -> Launch:
        """The launch for the gradients that are needed."""
        if (features, weight) not in self.by_needs:
            blocks = self.blocks if features else 0
            numbers = (self.count, self.classes, self.size, blocks, self.ignored, self.scale)
            grid = (blocks + (self.weight_blocks if weight else 0),)
            flags = {"SCALE": self.kind, "REDUCTION": self.reduction, **self.tile}
            self.by_needs[features, weight] = Launch(kernels.inputs_gradient_kernel, grid, numbers, 4, **flags)
        return self.by_needs[features, weight]


@functools.lru_cache(maxsize=256)
def passes_of(settings: Settings, shape: tuple[int, int], classes: int, dtype: torch.dtype, *kinds: Any) -> Passes:
    """The launches for features of this shape and dtype, cached by all arguments; `kinds` are dtypes and device."""
    return Passes(settings, shape[0], classes, shape[1], dtype == torch.float16)


class Head(NamedTuple):
    """The inputs of the loss."""

    features: Tensor
    weight: Tensor
    logarithm: Tensor | None
    labels: Tensor

    def passes(self, settings: Settings) -> Passes:
        x, w, log = self.features, self.weight, self.logarithm
        kinds = (x.dtype, w.dtype, None if log is None else log.dtype, x.device)
        return passes_of(settings, tuple(x.shape), len(w), *kinds)

    def multiply(self, unit: Tensor, products: Tensor) -> None:
        # Autocast leaves products with `out` in float32.
        torch.mm(unit, self.weight.float().t(), out=products)


def forward(head: Head, step: Tensor, eased: Tensor, settings: Settings) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss, inner products, directions of the features, and the state; updates step and share in place."""
    passes, x = head.passes(settings), head.features.contiguous()
    unit = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    products = torch.empty(passes.count, passes.classes, dtype=torch.float32, device=x.device)
    loss = torch.empty(passes.count if passes.reduction == kernels.NONE else (), dtype=torch.float32, device=x.device)
    state = passes.state.allocate(x.device)
    norms, inverse, rows, numbers = passes.state.places(state)
    partial = torch.empty(3 * passes.count * passes.parts, dtype=torch.float32, device=x.device)
    logarithm = eased if head.logarithm is None else head.logarithm
    with device_guard(x):
        stream, ok = raw_stream(x.device), aligned(x, head.weight, head.labels, step, eased, logarithm)
        passes.norms(x, unit, norms, head.weight, inverse, stream=stream, aligned=ok)
        head.multiply(unit, products)
        given = (products, inverse, head.labels, norms, logarithm, partial)
        passes.sums(*given, stream=stream, aligned=ok)
        passes.loss(*given, step, eased, rows, numbers, loss, stream=stream, aligned=ok)
    return loss, products, unit, state


def backward(
    head: Head,
    settings: Settings,
    gradient: Tensor,
    saved: tuple[Tensor, Tensor, Tensor],
    needs: tuple[bool, bool],
    in_place: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of features, weights and the logarithm of the scale; `in_place` overwrites the inner products."""
    passes, (products, unit, state) = head.passes(settings), saved
    x, w = head.features, head.weight
    norms, inverse, rows, numbers = passes.state.places(state)
    logarithm, gradient = unit if head.logarithm is None else head.logarithm, gradient.contiguous()
    found = products if in_place else torch.empty_like(products)
    # The gradient of the scale is computed with that of the features.
    needs = needs[0] or head.logarithm is not None, needs[1]
    with device_guard(x):
        stream, ok = raw_stream(x.device), aligned(w, head.labels, gradient, products, unit, logarithm)
        given = (head.labels, norms, logarithm, rows, numbers, gradient)
        passes.products(products, found, inverse, *given, stream=stream, aligned=ok)
        of_unit, of_weight = torch.empty_like(unit), w.new_empty(w.shape if needs[1] else 0, dtype=torch.float32)
        if needs[0]:
            torch.mm(found, w.float(), out=of_unit)
        if needs[1]:
            torch.mm(found.t(), unit, out=of_weight)
        of_x = of_unit if x.dtype == torch.float32 else torch.empty_like(unit, dtype=x.dtype)
        of_w = of_weight if w.dtype == torch.float32 else torch.empty_like(of_weight, dtype=w.dtype)
        of_scale = unit if head.logarithm is None else torch.empty(passes.count, dtype=torch.float32, device=x.device)
        rest = (of_weight, w, inverse, of_w, head.labels, logarithm, rows, numbers, gradient)
        passes.inputs(*needs)(of_unit, unit, norms, of_x, of_scale, *rest, stream=stream, aligned=ok)
    of_log = None if head.logarithm is None else of_scale.sum().to(head.logarithm.dtype)
    return of_x if needs[0] else None, of_w if needs[1] else None, of_log
