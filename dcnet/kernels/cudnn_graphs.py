"""Convolutions as graphs of cuDNN that also do what follows a convolution; they need the extra `cudnn`."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcnet.kernels.launch import capturing, raw_stream
from dcnet.kernels.plan import Window
from dcnet.norms import HALF_PRECISIONS

# Plans that need more memory than this are not tried.
MOST_WORKSPACE = 256 << 20


class Form(NamedTuple):
    """What a graph computes, from tensors in this order:

    - "multiplied": convolution(x, w) * factor, from x, w and factor [N, 1, P, Q];
    - "tanh": convolution(x, w) * factor * tanh(norm * rate), from x, w, factor, norm and rate [1, C, 1, 1];
    - "added": the gradient of x by dz, plus x * factor, from dz, w, x and factor [N, 1, H, W].

    The last tensor is the result. Factors, norms and rates are float32, all others have the dtype of the convolution.
    """

    kind: str
    window: Window
    dtype: torch.dtype

    @property
    def sizes(self) -> list[tuple[int, int, int, int]]:
        """The sizes of all tensors."""
        window = self.window
        x, w = (window.batch, window.channels, *window.size), (window.filters, window.channels, *window.kernel)
        y, rate = (window.batch, window.filters, *window.out), (1, window.filters, 1, 1)
        patches, pixels = (window.batch, 1, *window.out), (window.batch, 1, *window.size)
        kinds = {"multiplied": [x, w, patches, y], "tanh": [x, w, patches, patches, rate, y]}
        return kinds.get(self.kind, [y, w, x, pixels, x])

    @property
    def names(self) -> tuple[str, ...]:
        kinds = {"multiplied": ("x", "w", "factor", "y"), "tanh": ("x", "w", "factor", "norm", "rate", "y")}
        return kinds.get(self.kind, ("dz", "w", "x", "factor", "dx"))

    @property
    def key(self) -> str:
        """A text that differs for graphs with different plans, on this machine and others."""
        package = frontend()
        versions = (torch.__version__, package.__version__, package.backend_version())
        return f"{self.kind} {self.dtype} {self.window} on {torch.cuda.get_device_name()} with {versions}"


@functools.cache
def frontend() -> Any:
    """The package nvidia-cudnn-frontend; None if it is missing or broken, or uses another cuDNN than torch."""
    try:
        import cudnn

        return cudnn if cudnn.backend_version() == torch.backends.cudnn.version() else None
    except Exception:
        return None


def available(x: Tensor) -> bool:
    """Whether graphs can convolve such an input."""
    return x.is_cuda and x.dtype in HALF_PRECISIONS and frontend() is not None


_handles = threading.local()


def ready(device: torch.device) -> bool:
    """Whether a graph can run now: during a capture, the thread must already have a handle."""
    return not capturing(device) or device.index in vars(_handles).get("by_device", ())


def _handle(device: torch.device) -> Any:
    """The handle of this thread and GPU, set to the current stream; the GPU is the current one."""
    found = vars(_handles).setdefault("by_device", {})
    if device.index not in found:
        found[device.index] = frontend().create_handle()
    frontend().set_stream(found[device.index], raw_stream(device))
    return found[device.index]


class Runner:
    """A graph with one of its plans."""

    def __init__(self, form: Form, plan: str):
        self.graph = _planned(form)
        self.graph.build_plan_at_index(_names(self.graph).index(plan))
        self.size, self.uids = self.graph.get_workspace_size(), tuple(range(1, len(form.names) + 1))
        if self.size > MOST_WORKSPACE:
            raise ValueError(
                f"the plan {plan} needs {self.size:,} bytes of memory, and {MOST_WORKSPACE:,} is the limit"
            )

    def __call__(self, *tensors: Tensor) -> None:
        device = tensors[0].device
        workspace = torch.empty(self.size, dtype=torch.uint8, device=device)
        self.graph.execute(tensors, workspace, handle=_handle(device), tensor_uids=self.uids)


def build(form: Form, plan: str) -> Callable[..., None]:
    """The graph with the plan of this name, to be called with all its tensors; an exception if there is none."""
    return Runner(form, plan)


def plans_of(form: Form) -> list[str]:
    """The names of all plans on the current GPU, the most promising first."""
    return _names(_planned(form))


def _names(graph: Any) -> list[str]:
    return [graph.get_plan_name_at_index(i) for i in range(graph.get_execution_plan_count())]


def _planned(form: Form) -> Any:
    """The graph after cuDNN has proposed its plans."""
    graph, modes = _graph(form), frontend().heur_mode
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([modes.A, modes.FALLBACK])
    return graph


def _graph(form: Form) -> Any:
    types = frontend().data_type
    own = {torch.bfloat16: types.BFLOAT16, torch.float16: types.HALF}[form.dtype]
    inner = {"intermediate_data_type": types.FLOAT, "compute_data_type": types.FLOAT}
    handle = _handle(torch.device("cuda", torch.cuda.current_device()))
    graph = frontend().pygraph(handle=handle, io_data_type=own, **inner)
    *sizes, result = form.sizes
    tensors = []
    for uid, (name, size) in enumerate(zip(form.names, sizes, strict=False), 1):
        dtype = types.FLOAT if name in ("factor", "norm", "rate") else own
        tensors.append(graph.tensor(name=name, dim=list(size), stride=_strides(size), data_type=dtype, uid=uid))
    between = functools.partial(_between, types.FLOAT, result)
    made = _BUILDERS[form.kind](graph, _sizes(form.window), between, *tensors)
    made.set_output(True).set_data_type(own).set_dim(list(result)).set_stride(_strides(result))
    made.set_uid(len(form.names))
    return graph


def _strides(size: tuple[int, int, int, int]) -> list[int]:
    """The strides of a tensor in channels last."""
    _, channels, high, wide = size
    return [channels * high * wide, 1, channels * wide, channels]


def _sizes(window: Window) -> dict[str, list[int]]:
    return {"padding": list(window.padding), "stride": list(window.stride), "dilation": list(window.dilation)}


def _between(dtype: Any, size: tuple[int, int, int, int], made: Any) -> Any:
    """A tensor of the result's size that stays in registers."""
    return made.set_data_type(dtype).set_dim(list(size)).set_stride(_strides(size))


def _multiplied(graph: Any, sizes: dict[str, list[int]], between: Any, x: Any, w: Any, factor: Any) -> Any:
    return graph.mul(a=between(graph.conv_fprop(image=x, weight=w, **sizes)), b=factor)


def _tanh(
    graph: Any, sizes: dict[str, list[int]], between: Any, x: Any, w: Any, factor: Any, norm: Any, rate: Any
) -> Any:
    cosine = between(_multiplied(graph, sizes, between, x, w, factor))
    return graph.mul(a=cosine, b=between(graph.tanh(input=between(graph.mul(a=norm, b=rate)))))


def _added(graph: Any, sizes: dict[str, list[int]], between: Any, dz: Any, w: Any, x: Any, factor: Any) -> Any:
    own = between(graph.conv_dgrad(loss=dz, filter=w, **sizes))
    return graph.add(a=own, b=between(graph.mul(a=x, b=factor)))


_BUILDERS: dict[str, Callable[..., Any]] = {"multiplied": _multiplied, "tanh": _tanh, "added": _added}
