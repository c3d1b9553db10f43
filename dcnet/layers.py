"""Decoupled layers: torch's own, with the inner product replaced by h(||w||, ||x||) * g(theta)."""

from collections.abc import Callable, MutableMapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import is_parametrized

from dcnet import functional
from dcnet.checks import check_number
from dcnet.eager import ConvPatches, LinearPatches, Options, Patches, Size, check_input
from dcnet.norms import HALF_PRECISIONS, Processes, accumulation_dtype, settled_count
from dcnet.operator import Operator, as_operator, is_plain
from dcnet.parameters import Value
from dcnet.tracing import Opaque, is_symbolic, mark_, record_call


class Decoupled(Opaque):
    """The base of all decoupled layers: the operator, and its state.

    Each learned constant is a parameter of the same name: `radius`, `k`, `scale`, ... If it must be positive, the
    parameter is r and the constant r^2 + 1e-4; `constants()` returns the constants. With a relative radius, the buffer
    `mean_norm` is the running mean of ||x||, zero until the first batch, and `num_batches_tracked` the number of its
    batches. The optional buffer `blend` is t in (1 - t) * plain + t * decoupled. `dcnet.sync_norms` sets `sync`.
    """

    sync: Processes | None = None
    weight: Tensor
    bias: Any  # Tensor or None; torch types it differently from layer to layer

    def __init__(self, *args: Any, operator: Operator | str, eps: float, blend: float | None, **kwargs: Any):
        described = as_operator(operator)
        check_settings(eps, blend)
        super().__init__(*args, **kwargs)
        self.set_operator(described, eps, blend)

    def set_operator(self, operator: Operator, eps: float, blend: float | None) -> None:
        """Sets the operator of a new layer, and adds the parameters and buffers that it needs."""
        self.operator, self.eps = operator, float(eps)
        if isinstance(self, nn.Linear):
            mark_(self)
        for name, slot in operator.learned.items():
            if hasattr(self, name):
                raise ValueError(f"{str(operator)!r} has a constant named {name!r}, which layers use: rename it")
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
        """Whether the layer depends on ||w||, through its operator or the plain layer that it blends with."""
        return self.operator.weighted or "blend" in self._buffers

    def forward(self, input: Tensor) -> Tensor:
        if is_symbolic(input):
            return record_call(self, input)
        output, blend = self.decoupled(input), self._buffers.get("blend")
        return output if blend is None else torch.lerp(self.plain(input), output, blend.to(output.dtype))

    own_forward = forward

    def decoupled(self, input: Tensor) -> Tensor:
        """f(w, x) + bias, without the blend."""
        raise NotImplementedError(f"{type(self).__name__} must define decoupled(input)")

    def patches(self, input: Tensor) -> Patches:
        """The patches of the input that the filters are applied to."""
        raise NotImplementedError(f"{type(self).__name__} must define patches(input)")

    def plain(self, input: Tensor) -> Tensor:
        """The output of torch's own layer with the same filters."""
        # Skips the forward of this class and of Opaque.
        output: Tensor = super(Opaque, self).forward(input)
        return output

    def constants(self) -> dict[str, Value]:
        """The current constants of the operator; a relative radius is not yet multiplied by the mean norm."""
        return self.operator.constants(self.learned())

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Layers pickled by earlier versions have no mark.
        if isinstance(self, nn.Linear):
            mark_(self)

    def reset_parameters(self) -> None:
        super().reset_parameters()  # type: ignore[misc]
        if "operator" in self.__dict__:
            self.reset_constants()

    @torch.no_grad()
    def reset_constants(self) -> None:
        """Resets learned constants, the mean norm and the blend to those of a new layer."""
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

    def learned(self) -> dict[str, Tensor]:
        """The learned constants as they are stored, by name."""
        return {name: self.stored(name) for name in self.operator.learned}

    def stored(self, name: str) -> Any:
        """A parameter by name, without the slow search of `nn.Module.__getattr__` where it is not needed.

        Parametrization and replication do not keep tensors among the parameters.
        """
        return self._parameters[name] if name in self._parameters else getattr(self, name)

    def options(self) -> Options:
        """The keyword arguments of the functions of `dcnet.functional`, from the state of the layer."""
        return {
            "operator": self.operator,
            "eps": self.eps,
            "constants": self.learned(),
            "mean_norm": self._buffers.get("mean_norm"),
            "num_batches_tracked": self._buffers.get("num_batches_tracked"),
            "training": self.training,
            "sync": self.sync,
        }

    def add_missing_count(self, state: MutableMapping[str, Any], prefix: str) -> None:
        """Adds the count of batches if it is missing, as in older state dicts; the warm-up then counts as finished."""
        count = f"{prefix}num_batches_tracked"
        if self.operator.decay is not None and f"{prefix}mean_norm" in state and count not in state:
            state[count] = torch.tensor(settled_count(self.operator.decay), device="cpu")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.add_missing_count(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Decoupled":
        """Moves and casts as torch does, but never the running mean to half precision, where updates would be lost."""
        before = self._buffers.get("mean_norm")
        super()._apply(fn, recurse)
        after = self._buffers.get("mean_norm")
        if before is not None and after is not None and after.dtype in HALF_PRECISIONS:
            self.mean_norm = before.to(after.device)
        return self


class _DecoupledConv(Decoupled, _ConvNd):
    """The base of the convolutions, which call `decoupled_function`, a stateless function of `dcnet.functional`."""

    decoupled_function: ClassVar[Callable[..., Tensor]]

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
            raise TypeError(f"stride must be a number, not {stride!r}: pass operators by keyword, operator={stride!r}")
        shape = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode)
        super().__init__(*shape, device, dtype, operator=operator, eps=eps, blend=blend)

    def arguments(self, input: Tensor) -> tuple[Any, ...]:
        """The arguments of torch's function: the padded input, the filters, the bias and the window."""
        padded, padding = input, self.padding
        if self.padding_mode != "zeros":
            check_input(input, self.in_channels, -len(self.kernel_size) - 1, "channels")
            padded, padding = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode), (0,)
        window = (self.stride, padding, self.dilation, self.groups)
        return padded, self.stored("weight"), self.stored("bias"), *window

    def decoupled(self, input: Tensor) -> Tensor:
        return self.decoupled_function(*self.arguments(input), **self.options())

    def patches(self, input: Tensor) -> Patches:
        padded, weight, _, *window = self.arguments(input)
        return ConvPatches(len(self.kernel_size), padded, weight, *window)


class DecoupledConv1d(_DecoupledConv, nn.Conv1d):
    """nn.Conv1d with f(w, x) in place of the inner product; further arguments as in `DecoupledConv2d`."""

    decoupled_function = staticmethod(functional.decoupled_conv1d)


class DecoupledConv2d(_DecoupledConv, nn.Conv2d):
    """nn.Conv2d with f(w, x) = h(||w||, ||x||) * g(theta) in place of the inner product.

    Arguments up to `dtype` are those of torch's layer.

    Args:
        operator: an Operator, or its spec such as "tanh-cos" or "seg(slope=0.2)-sqcos+linear". Its learned constants
            become parameters of the layer; a relative radius needs the buffer `mean_norm`.
        eps: added under the square root of ||w|| and ||x||, so that both are positive with finite slopes at zero.
        blend: None for the decoupled layer alone. A number t from 0 to 1 makes the layer (1 - t) * plain +
            t * decoupled, with t in the buffer `blend`; see `dcnet.convert.BlendSchedule`.
    """

    decoupled_function = staticmethod(functional.decoupled_conv2d)


class DecoupledConv3d(_DecoupledConv, nn.Conv3d):
    """nn.Conv3d with f(w, x) in place of the inner product; further arguments as in `DecoupledConv2d`."""

    decoupled_function = staticmethod(functional.decoupled_conv3d)


class DecoupledLinear(Decoupled, nn.Linear):
    """nn.Linear with f(w, x) in place of the inner product; further arguments as in `DecoupledConv2d`."""

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
            raise TypeError(f"bias must be True or False, not {bias!r}: pass operators by keyword, operator={bias!r}")
        super().__init__(in_features, out_features, bias, device, dtype, operator=operator, eps=eps, blend=blend)

    def decoupled(self, input: Tensor) -> Tensor:
        return functional.decoupled_linear(input, self.stored("weight"), self.stored("bias"), **self.options())

    def patches(self, input: Tensor) -> Patches:
        return LinearPatches(input, self.weight)


def check_settings(eps: float, blend: float | None) -> None:
    """Checks eps and the blend, from 0 for the plain layer to 1 for the decoupled one."""
    check_number("eps", eps, least=0)
    if blend is not None:
        check_number("blend", blend, least=0, most=1)


def conv1d(*args: Any, operator: Operator | str, **kwargs: Any) -> nn.Conv1d:
    """nn.Conv1d for the operator "conv", DecoupledConv1d for any other."""
    return _build(nn.Conv1d, DecoupledConv1d, args, operator, kwargs)


def conv2d(*args: Any, operator: Operator | str, **kwargs: Any) -> nn.Conv2d:
    """nn.Conv2d for the operator "conv", DecoupledConv2d for any other, so that a network is written once."""
    return _build(nn.Conv2d, DecoupledConv2d, args, operator, kwargs)


def conv3d(*args: Any, operator: Operator | str, **kwargs: Any) -> nn.Conv3d:
    """nn.Conv3d for the operator "conv", DecoupledConv3d for any other."""
    return _build(nn.Conv3d, DecoupledConv3d, args, operator, kwargs)


def linear(*args: Any, operator: Operator | str, **kwargs: Any) -> nn.Linear:
    """nn.Linear for the operator "conv", DecoupledLinear for any other."""
    return _build(nn.Linear, DecoupledLinear, args, operator, kwargs)


def _build(plain: Any, decoupled: Any, args: Any, operator: Operator | str, kwargs: dict[str, Any]) -> Any:
    if not is_plain(operator):
        return decoupled(*args, operator=operator, **kwargs)
    # A plain layer has neither eps nor a blend.
    return plain(*args, **{name: value for name, value in kwargs.items() if name not in ("eps", "blend")})
