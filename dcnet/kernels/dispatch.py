"""Decides which layers use the fused kernels, and calls them; everything else falls back to eager PyTorch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dcnet.device_functions import AVAILABLE
from dcnet.eager import Options, Size, check_options, each_dimension, padding_ends, sharing
from dcnet.kernels.convolution import mean_kind
from dcnet.kernels.passes import BATCH_MEAN, MOST_SUMS, PLACES, SQUARES, slices_of
from dcnet.kernels.plan import has_device_functions, lies_channels_last
from dcnet.norms import HALF_PRECISIONS
from dcnet.operator import Operator, as_operator

if AVAILABLE:
    from dcnet.kernels.autograd import apply_fused, apply_fused_rows, arguments_of, as_image, as_rows
    from dcnet.kernels.convolution import Call, Convolution
    from dcnet.kernels.depthwise import Depthwise
    from dcnet.kernels.folded_inference import folded_conv2d
    from dcnet.kernels.known_calls import Known, Signature, recall, remember, signature
    from dcnet.kernels.unit_filters import UnitFilters
    from dcnet.kernels.unit_product import is_cosine, multiply_units, pays, recall_product, remember_product

DTYPES = (*HALF_PRECISIONS, torch.float32)

# Limits: a tile holds all channels of a group or slice, loops over windows are unrolled, positions are 32-bit integers,
# also those that the last step of a loop adds.
MOST_CHANNELS, LARGEST_WINDOW, LARGEST = 4096, 121, 2**31 - MOST_SUMS * max(PLACES, SQUARES.elements)

Sizes = tuple[int, ...]

# Stride, padding, dilation and groups of a linear layer as a convolution.
ROWS = (1, 0, 1, 1)

_enabled = AVAILABLE and os.environ.get("DCNET_KERNELS", "on") != "off"


@contextlib.contextmanager
def use_kernels(on: bool) -> Iterator[None]:
    """Turns the fused kernels on or off inside a `with`. They are on by default if Triton is installed."""
    global _enabled
    before = _enabled
    _enabled = on and AVAILABLE
    try:
        yield
    finally:
        _enabled = before


def enabled() -> bool:
    """Whether the fused kernels are turned on."""
    return _enabled


def fits(x: Tensor, w: Tensor, bias: Tensor | None, padding: Size | str, groups: int, options: Options) -> bool:
    """Whether the fused kernels support this convolution and are faster than eager PyTorch."""
    if not _enabled or not isinstance(x, Tensor) or not x.is_cuda or x.dim() != 4 or sharing(options) is not None:
        return False
    supported = not (is_wrapper(x) or is_wrapper(w)) and _supports_operator(options) and _supports_constants(options, w)
    return supported and _supports_tensors(x, w, bias, padding, groups) and not is_traced()


def is_wrapper(tensor: Tensor) -> bool:
    """Whether the tensor is a wrapper around other tensors, such as a DTensor."""
    return type(tensor) not in (Tensor, torch.nn.Parameter) and is_traceable_wrapper_subclass(tensor)


def _supports_operator(options: Options) -> bool:
    given = options.get("operator")
    if given is None:
        return False
    op = as_operator(given)
    if op.norm_cancels:
        return filters_alone(op) and not torch.compiler.is_compiling()
    return has_device_functions(op)


def _supports_constants(options: Options, w: Tensor) -> bool:
    """Whether the constants have the sizes that a layer stores; unlike torch, the kernels do not broadcast others."""
    given, learned = options.get("constants") or {}, as_operator(options["operator"]).learned
    return all(
        given[name].numel() == (w.shape[0] if slot.per_channel else 1)
        for name, slot in learned.items()
        if name in given
    )


def filters_alone(op: Operator) -> bool:
    """Whether the operator is a plain convolution with normalized or original filters, times a fixed scale."""
    single = len(op.magnitude.parts) == 1 and not op.learned
    return single and op.angle.identity and (not op.weighted or op.weighting.multiplies)


def _supports_tensors(x: Tensor, w: Tensor, bias: Tensor | None, padding: Size | str, groups: int) -> bool:
    autocast = torch.is_autocast_enabled("cuda")
    dtype = torch.get_autocast_dtype("cuda") if autocast else x.dtype
    wide = (dtype, torch.float32) if autocast else (dtype,)
    if dtype not in DTYPES or w.dtype not in wide or not w.is_cuda or w.dim() != 4:
        return False
    # torch broadcasts or rejects a bias of another shape; kernels would read out of bounds.
    if bias is not None and (bias.dtype not in wide or bias.shape != w.shape[:1]):
        return False
    channels = w.shape[0] // max(groups, 1)
    slices = slices_of(channels) if groups == 1 else 1
    # Every slice has its own gradient of the norms.
    positions = x.shape[0] * groups * slices
    return (
        x.numel() > 0
        and x.shape[1] == w.shape[1] * groups
        and w.shape[0] == channels * groups
        and 0 < channels // slices <= MOST_CHANNELS
        and max(max(positions, w.shape[0], x.shape[1]) * _places(x, padding), w.numel()) < LARGEST
        and w.shape[2] * w.shape[3] <= LARGEST_WINDOW
        and (not isinstance(padding, str) or padding == "valid" or (padding == "same" and _has_odd_sides(w)))
        and modern(x.device)
    )


def _places(x: Tensor, padding: Size | str) -> int:
    """The number of pixels of a padded image, an upper bound of its number of patches."""
    pads = each_dimension(0 if isinstance(padding, str) else padding, 2)
    return (x.shape[2] + 2 * pads[0]) * (x.shape[3] + 2 * pads[1])


def _has_odd_sides(w: Tensor) -> bool:
    """Whether the kernel sides are odd, so that padding="same" pads both ends equally for every dilation."""
    return w.shape[2] % 2 == 1 and w.shape[3] % 2 == 1


def modern(device: torch.device) -> bool:
    """Whether the GPU has compute capability 8.0 or higher."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def exporting() -> bool:
    """Whether torch.export is tracing. A compiler treats the result as a constant; see below."""
    return torch.compiler.is_exporting()


# Does what torch.compiler.assume_constant_result does, without importing the compiler.
modern._dynamo_marked_constant = True  # type: ignore[attr-defined]
exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_traced() -> bool:
    """Whether torch's own operations are needed: by export, tracing, a functorch transform or forward-mode autograd."""
    if exporting() or torch._C._get_tracing_state() is not None:
        return True
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def conv2d(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    stride: Size,
    padding: Size | str,
    dilation: Size,
    groups: int,
    options: Options,
    known: Known | None = None,
) -> Tensor:
    """f(w, x) + bias by the fused kernels; also updates the running mean. Call it only if `fits` is true.

    With `known`, the result of `find_known`, the call skips all checks.
    """
    if known is not None:
        return _run(known.fused, known.call(x, w, bias, options))
    if padding == "same" and each_dimension(stride, 2) != (1, 1):
        raise ValueError(f"padding='same' requires stride 1, not {stride}")
    op, running = check_options(options), options.get("mean_norm")
    if op.norm_cancels:
        return _with_filters(op, x, w, bias, options.get("eps", 1e-4), (stride, padding, dilation, groups))
    mean = mean_kind(op.decay, running, options.get("training", False))
    tracked = options.get("num_batches_tracked") if running is not None else None
    window = sizes(w, stride, padding, dilation)
    settings = (running, tracked, str(op), options.get("eps", 1e-4), *window, groups, mean)
    constants = stored(op, options, w)
    if is_plain_eager(x):
        cast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        call = Call(x if cast is None else x.to(cast), w, bias, constants, *settings)
        fused, names = call.convolution(in_place=True), tuple(op.learned)
        if all(name in (options.get("constants") or {}) for name in names):
            key = signature(x, w, bias, (stride, padding, dilation, groups), options)
            remember(key, Known(op, fused, names, cast, settings[2:]))
        return _run(fused, call)
    output, *_, updated = torch.ops.dcnet.conv2d.default(*arguments_of(Call(x, w, bias, constants, *settings)))
    if mean == BATCH_MEAN and running is not None:
        running.copy_(updated[0])
        if tracked is not None:
            tracked.copy_(updated[1])
    return output


def linear(input: Tensor, w: Tensor, bias: Tensor | None, options: Options) -> Tensor | None:
    """f(w, x) + bias of the rows of an input [..., in] by the kernels of 1x1 filters; None if they do not support it.

    The rows are the pixels of one image of height 1 with its channels last, so that nothing is copied.
    """
    if not _enabled or not _are_rows(input, w):
        return None
    key = _signature(input, w, bias, ROWS, options)
    if (known := recall(key)) is not None:
        return _run_rows(known, input, w, bias, options)
    if (cosine := recall_product(key)) is not None:
        return multiply_units(cosine, input, w, bias, options, plain=True)
    rows, filters = as_image(input), w.view(*w.shape, 1, 1)
    if not fits(rows, filters, bias, 0, 1, options):
        return None
    if (op := check_options(options)).norm_cancels:
        made = _filters_of(op, rows, filters, options.get("eps", 1e-4))
        return F.linear(input, made.view(w.shape), bias)
    if is_cosine(op) and pays(w):
        remember_product(key, op)
        return multiply_units(op, input, w, bias, options, is_plain_eager(input))
    output = conv2d(rows, filters, bias, *ROWS, options)
    if (found := find_known(rows, filters, bias, *ROWS, options)) is not None:
        remember(key, found)
    return as_rows(output, input.shape[:-1])


def _run_rows(known: Known, input: Tensor, w: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    """f(w, x) + bias of rows whose kernels are known."""
    call = known.call(input, w, bias, options)
    x, w, bias, constants, *others = call
    if needs_gradient((x, w, bias, *constants)):
        return apply_fused_rows(x, w, bias, known.fused, others, *constants)
    call = call._replace(x=as_image(x), w=w.view(*w.shape, 1, 1))
    return as_rows(known.fused.forward(call, keep=False)[0], input.shape[:-1])


def _are_rows(input: Tensor, w: Tensor) -> bool:
    """Whether the tensors are a batch of rows and a matrix of filters on a GPU, neither of them a tensor subclass."""
    if not isinstance(input, Tensor) or not input.is_cuda or not w.is_cuda or input.is_nested:
        return False
    plain = torch.compiler.is_compiling() or type(w) in (Tensor, torch.nn.Parameter)
    return plain and input.dim() > 1 and w.dim() == 2 and input.shape[-1] == w.shape[1] and input.numel() > 0


def conv1d(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    stride: Size,
    padding: Size | str,
    dilation: Size,
    groups: int,
    options: Options,
) -> Tensor | None:
    """f(w, x) + bias of a batch of sequences as images of height 1; None if the kernels do not support it."""
    if not _enabled or not isinstance(x, Tensor) or not x.is_cuda or x.dim() != 3 or w.dim() != 3:
        return None
    pads, *others = (each_dimension(0 if isinstance(size, str) else size, 1) for size in (padding, stride, dilation))
    if any(len(sizes) != 1 for sizes in (pads, *others)):
        return None
    ends = padding if isinstance(padding, str) else (0, *pads)
    window = ((1, *others[0]), ends, (1, *others[1]), groups)
    images, filters = x.unsqueeze(2), w.unsqueeze(2)
    known = find_known(images, filters, bias, *window, options)
    if known is None and not fits(images, filters, bias, ends, groups, options):
        return None
    return conv2d(images, filters, bias, *window, options, known).squeeze(2)


def find_known(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    stride: Size,
    padding: Size | str,
    dilation: Size,
    groups: int,
    options: Options,
) -> Known | None:
    """What `conv2d` found out in an earlier call with the same signature, in plain eager mode; `fits` was true then."""
    key = _signature(x, w, bias, (stride, padding, dilation, groups), options)
    # Without Triton there are no known calls at all.
    return None if key is None else recall(key)


def _signature(x: Tensor, w: Tensor, bias: Tensor | None, window: Sequence[Any], options: Options) -> Signature | None:
    """The signature of a call in plain eager mode; None in other modes, and if it has none."""
    if torch.compiler.is_compiling() or not (_enabled and isinstance(x, Tensor) and x.is_cuda):
        return None
    if is_traced() or not is_plain_eager(x):
        return None
    return signature(x, w, bias, window, options)


def needs_gradient(tensors: Sequence[Tensor | None]) -> bool:
    """Whether autograd must record a call with these tensors."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return False
    return True in [tensor is not None and tensor.requires_grad for tensor in tensors]


def _run(fused: Convolution | Depthwise, call: Call) -> Tensor:
    x, w, bias, constants, *others = call
    if needs_gradient((x, w, bias, *constants)):
        return apply_fused(x, w, bias, fused, others, *constants)
    return fused.forward(call, keep=False)[0]


def fits_folded(x: Tensor, w: Tensor, bias: Tensor | None, op: Operator, padding: Size | str, groups: int) -> bool:
    """Whether the kernels support inference with this folded layer, in eager mode or compiled."""
    if op.norm_cancels or torch.is_autocast_enabled("cuda"):
        return False
    if not torch.compiler.is_compiling() and not is_plain_eager(x):
        return False
    learning = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, w, bias))
    return not learning and x.dtype == w.dtype and fits(x, w, bias, padding, groups, {"operator": op})


def folded(
    x: Tensor, w: Tensor, bias: Tensor | None, table: Tensor, op: Operator, eps: float, window: Sequence[Any]
) -> Tensor:
    """Inference with a folded layer. Call it only if `fits_folded` is true."""
    *given, groups = window
    run = folded_conv2d if is_plain_eager(x) else torch.ops.dcnet.folded_conv2d.default
    return run(x, w, bias, table, str(op), eps, *sizes(w, *given), groups)


def _with_filters(op: Operator, x: Tensor, w: Tensor, bias: Tensor | None, eps: float, window: Any) -> Tensor:
    """f(w, x) for the operators of `filters_alone`: a plain convolution with normalized or original filters."""
    return F.conv2d(x, _filters_of(op, x, w, eps), bias, *window)


def _filters_of(op: Operator, x: Tensor, w: Tensor, eps: float) -> Tensor:
    scale = op.slots["scale"].init
    if op.weighted:
        return w if scale == 1 else w * scale
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    return UnitFilters.apply(w, scale, eps, dtype, lies_channels_last(x))


def is_plain_eager(x: Tensor) -> bool:
    """True in plain eager mode: no compiler, no dispatch mode, no tensor subclass."""
    if torch.compiler.is_compiling():
        return False
    return type(x) in (Tensor, torch.nn.Parameter) and torch._C._len_torch_dispatch_stack() == 0


def stored(op: Operator, options: Options, w: Tensor) -> list[Tensor]:
    """The learned constants in the order of the operator; initial values for those that are not given."""
    given = options.get("constants") or {}
    return [
        given[name] if name in given else slot.initial(w.shape[0]).to(w.device) for name, slot in op.learned.items()
    ]


def sizes(w: Tensor, stride: Size, padding: Size | str, dilation: Size) -> tuple[Sizes, Sizes, Sizes]:
    """Stride, padding and dilation, each of height and width."""
    steps, gaps = each_dimension(stride, 2), each_dimension(dilation, 2)
    pads = tuple(before for before, _ in padding_ends(padding, w.shape[2:], gaps))
    for name, given, least in (("stride", steps, 1), ("padding", pads, 0), ("dilation", gaps, 1)):
        if len(given) != 2 or min(given) < least:
            raise RuntimeError(f"{name} must be one or two numbers of at least {least}, not {given}")
    return steps, pads, gaps
