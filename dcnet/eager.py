"""f(w, x) = h(||w||, ||x||) * g(theta) in eager PyTorch, for linear and 1-3d convolutional layers."""

from collections.abc import Mapping, Sequence
from typing import Any, Required, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from dcnet.checks import check_tensor
from dcnet.norms import (
    Processes,
    accumulation_dtype,
    filter_norm,
    mean_norm,
    patch_norm,
    vector_norm,
    within_range,
)
from dcnet.operator import Operator, as_operator
from dcnet.parameters import Value

Size = int | Sequence[int]

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


class Options(TypedDict, total=False):
    """Keyword arguments of every function of `dcnet.functional`, in addition to torch's arguments.

    operator: an Operator or its spec.
    eps: added under the square root of both norms.
    constants: the learned constants by name, as a layer stores them; without them, those of a new layer.
    mean_norm: the running mean norm of a relative radius; without it the mean of the batch is used.
    num_batches_tracked: the batches in `mean_norm`, as an integer tensor; with it the decay of the running mean warms
        up, see `dcnet.norms.warmed_up`.
    training: use the mean norm of the batch, with its gradient, and update `mean_norm` and its count in place.
    sync: the processes whose batches count as one if the mean of the batch is used; see `dcnet.sync_norms`.
    """

    operator: Required[Operator | str]
    eps: float
    constants: Mapping[str, Tensor] | None
    mean_norm: Tensor | None
    num_batches_tracked: Tensor | None
    training: bool
    sync: Processes | None


class Patches:
    """The patches of an input: their norms, and their inner products with filters.

    `shape` is the shape in which one value per filter broadcasts against products and norms.
    """

    shape: tuple[int, ...]

    def multiply(self, filters: Tensor, bias: Tensor | None = None) -> Tensor:
        """The inner product of every patch with every filter."""
        raise NotImplementedError

    def norm(self, eps: float) -> Tensor:
        """The norm of every patch, in a shape that broadcasts against the products."""
        raise NotImplementedError

    def arrange(self, output: Tensor) -> Tensor:
        """The output in the layout of torch's layer."""
        raise NotImplementedError

    def per_filter(self, values: Tensor) -> Tensor:
        """Reshapes values, one per filter or one for all, to broadcast against products and norms."""
        return values.view(self.shape if values.numel() != 1 else (1,) * len(self.shape))

    def finish(self, g: Tensor, h: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """g * h + bias, computed in float32 or better and returned in `dtype`."""
        output = g * h if bias is None else torch.addcmul(self.per_filter(bias), g, h)
        return output.to(dtype)


class LinearPatches(Patches):
    """The rows of an input [..., in]; the sequences of a nested tensor are one batch of rows."""

    shape = (-1,)

    def __init__(self, input: Tensor, weight: Tensor):
        check_tensor("input", input)
        self.input, self.rows = input, _nested_rows(input) if input.is_nested else input
        check_input(self.rows, weight.shape[1], -1, "features")

    def multiply(self, filters: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(self.rows, filters, bias)

    def norm(self, eps: float) -> Tensor:
        return vector_norm(self.rows, eps)

    def arrange(self, output: Tensor) -> Tensor:
        if not self.input.is_nested:
            return output
        if self.input.layout == torch.jagged:
            jagged: Any = self.input
            return torch.nested.nested_tensor_from_jagged(output, jagged.offsets())
        sizes = [part.shape[:-1] for part in self.input.unbind()]
        parts = output.split([size.numel() for size in sizes])
        found = [part.unflatten(0, size) for part, size in zip(parts, sizes, strict=True)]
        return torch.nested.as_nested_tensor(found, layout=self.input.layout)


def _nested_rows(input: Tensor) -> Tensor:
    if input.layout == torch.jagged:
        jagged: Any = input
        return jagged.values()
    return torch.cat([part.flatten(0, -2) for part in input.unbind()])


class ConvPatches(Patches):
    """The patches of a 1-3d convolution with filters shaped as `weight`; other arguments are those of torch."""

    def __init__(
        self,
        spatial: int,
        input: Tensor,
        weight: Tensor,
        stride: Size = 1,
        padding: Size | str = 0,
        dilation: Size = 1,
        groups: int = 1,
    ):
        check_tensor("input", input)
        if weight.dim() != spatial + 2:
            raise ValueError(f"weight of shape {list(weight.shape)} must have {spatial + 2} dimensions")
        if input.dim() not in (spatial + 1, spatial + 2):
            raise ValueError(f"input of shape {list(input.shape)} must have {spatial + 1} or {spatial + 2} dimensions")
        if groups < 1 or weight.shape[0] % groups:
            raise ValueError(f"groups must divide the number of filters, {weight.shape[0]}, not {groups}")
        check_input(input, weight.shape[1] * groups, -spatial - 1, "channels")
        self.batched = input.dim() == spatial + 2
        self.input = input if self.batched else input.unsqueeze(0)
        self.kernel, self.groups = tuple(weight.shape[2:]), groups
        # A single size is repeated for every dimension, since the export to ONNX gets a tuple of one wrong.
        self.stride, self.dilation = each_dimension(stride, spatial), each_dimension(dilation, spatial)
        self.padding = padding if isinstance(padding, str) else each_dimension(padding, spatial)
        self.channels_last = _channels_last(self.input) or _channels_last(weight)
        per_group = (groups, -1) if groups > 1 else (-1,)
        self.shape = per_group if self.channels_last else (*per_group, *[1] * spatial)

    def multiply(self, filters: Tensor, bias: Tensor | None = None) -> Tensor:
        convolution = CONVOLUTIONS[len(self.kernel)]
        product = convolution(self.input, filters, bias, self.stride, self.padding, self.dilation, self.groups)
        product = product.unflatten(1, (self.groups, -1)) if self.groups > 1 else product
        return _move_channels(product, self.groups, 1, -1) if self.channels_last else product

    def norm(self, eps: float) -> Tensor:
        ends = padding_ends(self.padding, self.kernel, self.dilation)
        n = patch_norm(self.input, self.kernel, self.stride, ends, self.dilation, self.groups, eps)
        n = n.unsqueeze(2) if self.groups > 1 else n
        return _move_channels(n, self.groups, 1, -1) if self.channels_last else n

    def arrange(self, output: Tensor) -> Tensor:
        output = _move_channels(output, self.groups, -1, 1) if self.channels_last else output
        output = output.flatten(1, 2) if self.groups > 1 else output
        return output if self.batched else output.squeeze(0)


def _channels_last(x: Tensor) -> bool:
    """Whether the channels of images or volumes are adjacent in memory.

    Products and norms then have their channels last too: the layout of a tensor of one channel is ambiguous, and
    operations between different layouts are slow. A compiler chooses layouts by itself.
    """
    if x.dim() < 4 or torch.compiler.is_compiling():
        return False
    return x.shape[1] > 1 and x.stride(1) == 1 and not x.is_contiguous()


def _move_channels(x: Tensor, groups: int, source: int, target: int) -> Tensor:
    """Moves the channels, with their groups before them, from dimension 1 to the last (-1), or back; returns a view."""
    if groups == 1:
        return x.movedim(source, target)
    ends = {1: (1, 2), -1: (-2, -1)}
    return x.movedim(ends[source], ends[target])


def each_dimension(size: Size, spatial: int) -> tuple[int, ...]:
    """One size per spatial dimension."""
    sizes = tuple(size) if isinstance(size, Sequence) else (size,)
    return sizes * spatial if len(sizes) == 1 else sizes


def padding_ends(padding: Size | str, kernel: Sequence[int], dilation: Sequence[int]) -> list[tuple[int, int]]:
    """Zeros before and after each spatial dimension; for "same", an odd one is added at the end, as in torch."""
    if padding == "same":
        totals = [step * (size - 1) for size, step in zip(kernel, dilation, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    sizes = each_dimension(0 if isinstance(padding, str) else padding, len(kernel))
    return [(size, size) for size in sizes]


def check_input(input: Tensor, expected: int, dim: int, what: str) -> None:
    """Checks that the input is floating-point and has as many channels or features as the filters."""
    check_tensor("input", input)
    if not input.is_floating_point():
        raise TypeError(f"input must be a floating-point tensor, not {input.dtype}: convert it with .float()")
    if input.dim() < -dim or input.shape[dim] != expected:
        raise ValueError(f"input of shape {list(input.shape)} must have {expected} {what}, as the filters do")


def decoupled(patches: Patches, weight: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    """f(w, x) + bias for all patches and all filters."""
    op, eps = check_options(options), options.get("eps", 1e-4)
    _check_bias(bias, weight)
    constants = _constants(op, options.get("constants") or {}, weight, patches)
    w_norm = patches.per_filter(filter_norm(weight, eps))
    factor = op.factor(w_norm, constants)
    # f = g(<w, x> / ||w||) (h / n) factor; if g is homogeneous, factors of w alone are multiplied into the filters.
    on_filters, on_output = 1 / w_norm, factor
    if op.angle.homogeneous and op.weighting.multiplies:
        on_filters, on_output = torch.ones_like(w_norm), 1.0
    elif op.angle.homogeneous and (op.weighting.nonnegative or op.angle.identity):
        on_filters, on_output = on_filters * factor, 1.0

    cancels = op.norm_cancels
    if cancels and op.angle.identity:
        h = op.h(op.weighting.argument(w_norm, torch.ones_like(w_norm)), constants)
        return patches.arrange(patches.multiply(scaled(weight, on_filters * h), bias))
    product = patches.multiply(scaled(weight, on_filters))
    n = torch.ones_like(w_norm[:1]) if cancels else patches.norm(eps)
    # n has one channel: what depends on n alone is computed before it is broadcast to all channels.
    h = op.h(op.weighting.argument(w_norm, n), relative_to_mean(op, constants, n, options))
    h = h * on_output if isinstance(on_output, Tensor) else h
    # Multiply by 1 / n: the gradient of a product takes fewer passes over all channels than that of a quotient.
    product, inverse = (product, n) if cancels else within_range(product, n)
    if op.angle.homogeneous:
        return patches.arrange(patches.finish(op.g(product, constants), h * inverse, bias, product.dtype))
    return patches.arrange(patches.finish(op.g(product * inverse, constants), h, bias, product.dtype))


def check_options(options: Options) -> Operator:
    """Checks the options. Returns the operator."""
    for name in options:
        if name not in Options.__annotations__:
            raise TypeError(f"unknown option {name!r}: known are {', '.join(Options.__annotations__)}")
    if "operator" not in options:
        raise TypeError("operator is missing: give an Operator or a spec, as in operator='tanh-cos'")
    op = as_operator(options["operator"])
    learned = op.learned
    for name in options.get("constants") or {}:
        if name not in learned:
            raise ValueError(f"{str(op)!r} learns no constant {name!r}: known are {', '.join(learned) or 'none'}")
    if not options.get("eps", 0) >= 0:
        raise ValueError(f"eps must not be negative, not {options['eps']!r}")
    return op


def _check_bias(bias: Tensor | None, weight: Tensor) -> None:
    """Rejects a bias that torch's convolutions reject; a linear layer broadcasts its bias, as in torch."""
    if bias is not None and weight.dim() > 2 and bias.shape != weight.shape[:1]:
        filters = list(weight.shape[:1])
        raise ValueError(f"bias of shape {list(bias.shape)} must have the shape {filters}, one number for each filter")


def _constants(op: Operator, stored: Mapping[str, Tensor], weight: Tensor, patches: Patches) -> dict[str, Value]:
    """Every constant in float32 or better, those per filter in a shape that broadcasts against the patches."""
    dtype = accumulation_dtype(weight.dtype)
    values = op.constants({name: tensor.to(dtype) for name, tensor in stored.items()})
    for name, value in values.items():
        if isinstance(value, Tensor):
            values[name] = patches.per_filter(value) if op.slots[name].size == 1 else value.to(weight.device, dtype)
    return values


def relative_to_mean(op: Operator, constants: dict[str, Value], n: Tensor, options: Options) -> dict[str, Value]:
    """The constants with every relative radius multiplied by the mean norm."""
    if op.decay is None:
        return constants
    training, sync = options.get("training", False), options.get("sync")
    mean = mean_norm(n, options.get("mean_norm"), options.get("num_batches_tracked"), op.decay, training, sync)
    return {name: value * mean if op.slots[name].relative else value for name, value in constants.items()}


def sharing(options: Options) -> Processes | None:
    """The processes that share the mean norm of their batches; None for one process, or for the running mean."""
    sync, tracks = options.get("sync"), options.get("mean_norm") is not None
    shares = sync is not None and sync.several and (not tracks or options.get("training", False))
    return sync if shares else None


def scaled(weight: Tensor, factor: Tensor) -> Tensor:
    """The filters, each times its factor, in the dtype of the filters."""
    return (weight * factor.reshape(-1, *[1] * (weight.dim() - 1))).to(weight.dtype)
