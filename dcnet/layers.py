"""Decoupled layers: torch's own, with the inner product replaced by h(||w||, ||x||) * g(theta)."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import is_parametrized

from dcnet import functional
from dcnet.equation import Processes, settled_count
from dcnet.functional import Options
from dcnet.learnable import check_number
from dcnet.meeting import Size, check_input
from dcnet.norms import accumulation_dtype
from dcnet.opaque import Opaque, mark_
from dcnet.operator import Operator, as_operator, is_plain
from dcnet.part import Value


class Decoupled(Opaque):
    """What all decoupled layers share: the operator, and the state it needs.

    Each learned constant is a parameter by its own name: `radius`, `k`, `scale`, ... Where it must be positive the
    parameter is r, and the constant r^2 + 1e-4; `constants()` gives the constants. `mean_norm` is the running mean of
    ||x||, zero until the first batch, and `num_batches_tracked` the number of batches in it; both are there only if a
    radius is relative to it. `blend` is t in
    (1 - t) * plain + t * decoupled, and there only if it was asked for. `sync` is set by `dcnet.sync_norms`.
    """

    sync: Processes | None = None
    weight: Tensor
    bias: Any  # Tensor or None; torch types it differently from layer to layer

    def __init__(self, *args: Any, operator: Operator | str, eps: float, blend: float | None, **kwargs: Any):
        described = as_operator(operator)
        check_options(eps, blend)
        super().__init__(*args, **kwargs)
        self._take(described, eps, blend)

    def _take(self, operator: Operator, eps: float, blend: float | None) -> None:
        """Gives the layer its operator, and what the operator learns and tracks."""
        self.operator, self.eps = operator, float(eps)
        if isinstance(self, nn.Linear):
            mark_(self)
        for name, slot in operator.learned.items():
            if hasattr(self, name):
                raise ValueError(f"{str(operator)!r} has a constant named {name!r}, which layers have themselves")
            self.register_parameter(name, nn.Parameter(slot.initial(self.weight.shape[0]).to(self.weight)))
        if operator.decay is not None:
            dtype = accumulation_dtype(self.weight.dtype)
            self.register_buffer("mean_norm", torch.zeros((), dtype=dtype, device=self.weight.device))
            count = torch.zeros((), dtype=torch.long, device=self.weight.device)
            self.register_buffer("num_batches_tracked", count)
        self.initial_blend = blend
        if blend is not None:
            self.register_buffer("blend", torch.tensor(float(blend), device=self.weight.device))

    @property
    def norm_matters(self) -> bool:
        """Whether the layer depends on ||w||, by its operator or by the plain layer that it blends with."""
        return self.operator.weighted or "blend" in self._buffers

    def compute(self, input: Tensor) -> Tensor:
        output, blend = self.decoupled(input), self._buffers.get("blend")
        return output if blend is None else torch.lerp(self.plain(input), output, blend.to(output.dtype))

    def decoupled(self, input: Tensor) -> Tensor:
        """f(w, x) + bias, whatever the blend."""
        raise NotImplementedError(f"{type(self).__name__} does not say how its filters meet the input")

    def plain(self, input: Tensor) -> Tensor:
        """What torch's own layer gives with the same filters."""
        # Past the forward of Opaque, which is this layer's own.
        output: Tensor = super(Opaque, self).forward(input)
        return output

    def constants(self) -> dict[str, Value]:
        """The operator's constants as they are now; a relative radius is still to be multiplied by the mean norm."""
        return self.operator.constants(self._learned())

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Layers that were pickled by earlier versions have no mark.
        if isinstance(self, nn.Linear):
            mark_(self)

    def reset_parameters(self) -> None:
        super().reset_parameters()  # type: ignore[misc]
        if "operator" in self.__dict__:
            self.reset_constants()

    @torch.no_grad()
    def reset_constants(self) -> None:
        """Sets what the operator learns and tracks back to where a new layer starts."""
        for name, slot in self.operator.learned.items():
            initial = slot.initial(self.weight.shape[0])
            if is_parametrized(self, name):
                setattr(self, name, initial.to(getattr(self, name)))
            else:
                self.get_parameter(name).copy_(initial)
        if self.operator.decay is not None:
            self.get_buffer("mean_norm").zero_()
            self.get_buffer("num_batches_tracked").zero_()
        if self.initial_blend is not None and "blend" in self._buffers:
            self.get_buffer("blend").fill_(self.initial_blend)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, operator={str(self.operator)!r}"

    def _learned(self) -> dict[str, Tensor]:
        # By attribute, since parametrization and replication keep tensors elsewhere than among the parameters.
        return {name: getattr(self, name) for name in self.operator.learned}

    def _options(self) -> Options:
        return {
            "operator": self.operator,
            "eps": self.eps,
            "constants": self._learned(),
            "mean_norm": self._buffers.get("mean_norm"),
            "num_batches_tracked": self._buffers.get("num_batches_tracked"),
            "training": self.training,
            "sync": self.sync,
        }

    def add_missing_count(self, state: MutableMapping[str, Any], prefix: str) -> None:
        """Adds to a state dict of an older version the count of batches that it lacks: past the warm-up."""
        count = f"{prefix}num_batches_tracked"
        if self.operator.decay is not None and f"{prefix}mean_norm" in state and count not in state:
            state[count] = torch.tensor(settled_count(self.operator.decay), device="cpu")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.add_missing_count(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Decoupled:
        """Moves and casts as torch does, but keeps the running mean, whose steps of 0.1 % half precision would lose."""
        before = self._buffers.get("mean_norm")
        super()._apply(fn, recurse)
        after = self._buffers.get("mean_norm")
        if before is not None and after is not None and after.dtype in (torch.float16, torch.bfloat16):
            self.mean_norm = before.to(after.device)
        return self


class _DecoupledConv(Decoupled, _ConvNd):
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size | str = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = None,
        *,
        operator: Operator | str = "tanh-cos",
        eps: float = 1e-4,
        blend: float | None = None,
    ):
        if isinstance(stride, str):
            raise TypeError(f"stride must be a number, not {stride!r}: an operator goes by name, operator={stride!r}")
        shape = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode)
        super().__init__(*shape, device, dtype, operator=operator, eps=eps, blend=blend)

    def _convolve(self, function: Callable[..., Tensor], input: Tensor) -> Tensor:
        padded, padding = input, self.padding
        if self.padding_mode != "zeros":
            check_input(input, self.in_channels, -len(self.kernel_size) - 1, "channels")
            padded, padding = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode), (0,)
        window = (self.stride, padding, self.dilation, self.groups)
        return function(padded, self.weight, self.bias, *window, **self._options())


class DecoupledConv1d(_DecoupledConv, nn.Conv1d):
    """nn.Conv1d with f(w, x) = h(||w||, ||x||) * g(theta) in place of the inner product.

    Arguments up to `dtype` are those of torch's layer.

    Args:
        operator: an Operator, or its spec such as "tanh-cos" or "seg(slope=0.2)-sqcos+linear". What it learns becomes
            parameters of the layer, and a relative radius a buffer `mean_norm`.
        eps: added under the square root of ||w|| and ||x||, so that both are positive and have finite slopes at zero.
        blend: None for the decoupled layer alone. A number t from 0 to 1 makes the layer (1 - t) * plain +
            t * decoupled, with t in the buffer `blend`; see `dcnet.convert.BlendSchedule`.
    """

    def decoupled(self, input: Tensor) -> Tensor:
        return self._convolve(functional.decoupled_conv1d, input)


class DecoupledConv2d(_DecoupledConv, nn.Conv2d):
    """nn.Conv2d with f(w, x) = h(||w||, ||x||) * g(theta) in place of the inner product.

    Arguments up to `dtype` are those of torch's layer.

    Args:
        operator: an Operator, or its spec such as "tanh-cos" or "seg(slope=0.2)-sqcos+linear". What it learns becomes
            parameters of the layer, and a relative radius a buffer `mean_norm`.
        eps: added under the square root of ||w|| and ||x||, so that both are positive and have finite slopes at zero.
        blend: None for the decoupled layer alone. A number t from 0 to 1 makes the layer (1 - t) * plain +
            t * decoupled, with t in the buffer `blend`; see `dcnet.convert.BlendSchedule`.
    """

    def decoupled(self, input: Tensor) -> Tensor:
        return self._convolve(functional.decoupled_conv2d, input)


class DecoupledConv3d(_DecoupledConv, nn.Conv3d):
    """nn.Conv3d with f(w, x) = h(||w||, ||x||) * g(theta) in place of the inner product.

    Arguments up to `dtype` are those of torch's layer.

    Args:
        operator: an Operator, or its spec such as "tanh-cos" or "seg(slope=0.2)-sqcos+linear". What it learns becomes
            parameters of the layer, and a relative radius a buffer `mean_norm`.
        eps: added under the square root of ||w|| and ||x||, so that both are positive and have finite slopes at zero.
        blend: None for the decoupled layer alone. A number t from 0 to 1 makes the layer (1 - t) * plain +
            t * decoupled, with t in the buffer `blend`; see `dcnet.convert.BlendSchedule`.
    """

    def decoupled(self, input: Tensor) -> Tensor:
        return self._convolve(functional.decoupled_conv3d, input)


class DecoupledLinear(Decoupled, nn.Linear):
    """nn.Linear with f(w, x) = h(||w||, ||x||) * g(theta) in place of the inner product.

    Arguments up to `dtype` are those of torch's layer.

    Args:
        operator: an Operator, or its spec such as "tanh-cos" or "seg(slope=0.2)-sqcos+linear". What it learns becomes
            parameters of the layer, and a relative radius a buffer `mean_norm`.
        eps: added under the square root of ||w|| and ||x||, so that both are positive and have finite slopes at zero.
        blend: None for the decoupled layer alone. A number t from 0 to 1 makes the layer (1 - t) * plain +
            t * decoupled, with t in the buffer `blend`; see `dcnet.convert.BlendSchedule`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        operator: Operator | str = "tanh-cos",
        eps: float = 1e-4,
        blend: float | None = None,
    ):
        if isinstance(bias, str):
            raise TypeError(f"bias must be True or False, not {bias!r}: an operator goes by name, operator={bias!r}")
        super().__init__(in_features, out_features, bias, device, dtype, operator=operator, eps=eps, blend=blend)

    def decoupled(self, input: Tensor) -> Tensor:
        return functional.decoupled_linear(input, self.weight, self.bias, **self._options())


def check_options(eps: float, blend: float | None) -> None:
    """Refuses an eps below zero, and a blend that is not between plain, 0, and decoupled, 1."""
    check_number("eps", eps)
    if eps < 0:
        raise ValueError(f"eps must not be negative, not {eps!r}")
    if blend is None:
        return
    check_number("blend", blend)
    if not 0 <= blend <= 1:
        raise ValueError(f"blend must be between 0, plain, and 1, decoupled, not {blend!r}")


def conv1d(*args: Any, operator: Operator | str, **kwargs: Any) -> nn.Conv1d:
    """nn.Conv1d for the operator "conv", DecoupledConv1d for any other: a network is written once."""
    return _built(nn.Conv1d, DecoupledConv1d, args, operator, kwargs)


def conv2d(*args: Any, operator: Operator | str, **kwargs: Any) -> nn.Conv2d:
    """nn.Conv2d for the operator "conv", DecoupledConv2d for any other: a network is written once."""
    return _built(nn.Conv2d, DecoupledConv2d, args, operator, kwargs)


def conv3d(*args: Any, operator: Operator | str, **kwargs: Any) -> nn.Conv3d:
    """nn.Conv3d for the operator "conv", DecoupledConv3d for any other: a network is written once."""
    return _built(nn.Conv3d, DecoupledConv3d, args, operator, kwargs)


def linear(*args: Any, operator: Operator | str, **kwargs: Any) -> nn.Linear:
    """nn.Linear for the operator "conv", DecoupledLinear for any other: a network is written once."""
    return _built(nn.Linear, DecoupledLinear, args, operator, kwargs)


def _built(plain: Any, decoupled: Any, args: Any, operator: Operator | str, kwargs: dict[str, Any]) -> Any:
    if not is_plain(operator):
        return decoupled(*args, operator=operator, **kwargs)
    # What only decoupled layers know of is nothing to a plain one.
    return plain(*args, **{name: value for name, value in kwargs.items() if name not in ("eps", "blend")})
