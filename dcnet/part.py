"""What magnitudes and angles have in common: a name, an equation, constants, and a place in a registry."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from dcnet.learnable import FLOOR, Learnable, check_flag, check_number, take_plain_numbers
from dcnet.radius import Radius, RadiusLike

Value = float | Tensor


@dataclass(frozen=True)
class Slot:
    """How a layer holds one constant: as a float of the description, or as a tensor of its own."""

    init: float
    learned: bool = False
    per_channel: bool = False
    positive: bool = False
    relative: bool = False
    floor: float = FLOOR
    size: int = 1

    def initial(self, channels: int) -> Tensor:
        """The stored tensor of a new layer, of shape [channels], or [size] for what all channels share, on the CPU."""
        stored = math.sqrt(self.init - self.floor) if self.positive else self.init
        return torch.full((channels if self.per_channel else self.size,), stored, device="cpu")

    @property
    def start(self) -> Value:
        """The constant of a new layer, as far as all channels share it."""
        return self.init if self.size == 1 else torch.full((self.size,), self.init, device="cpu")

    def value(self, stored: Tensor) -> Tensor:
        """The constant that a stored tensor stands for."""
        return stored.square() + self.floor if self.positive else stored

    def __str__(self) -> str:
        text = f"{self.init:g}" + (" x mean ||x||" if self.relative else "")
        return text + (" (learned per channel)" if self.per_channel else " (learned)") if self.learned else text


def constant(default: float | Radius, symbol: str, positive: bool = False) -> Any:
    """Declares a field that enters the equation as `symbol` and may be learned."""
    return field(default=default, metadata={"symbol": symbol, "positive": positive})


@dataclass(frozen=True)
class Part:
    """One factor of an operator: a magnitude or an angle.

    A subclass states its `name` in specs, its `equation`, its constants as fields made by `constant`, and `value`,
    which receives each constant by the name of its field, as a float or as a tensor that broadcasts against the rest.
    `learnable=True` makes a learned constant of each one given as a number; a radius says so itself.

    `device` is the same once more for the fused kernels; a part without one is computed by torch.
    """

    name: ClassVar[str]
    equation: ClassVar[str]
    device: ClassVar[Any] = None
    learnable: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        take_plain_numbers(self)
        check_flag(f"learnable of {self.name}", self.learnable)
        for declared in self._constants():
            self._check(declared, getattr(self, declared.name))
        if self.learnable and not any(slot.learned for slot in self.slots().values()):
            raise ValueError(f"learnable=True asks {self.name} to learn, but it has no constant that can be learned")

    def value(self, argument: Tensor, *args: Any, **constants: Any) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not say what its value is")

    def fixed_numbers(self) -> tuple[float, ...]:
        """What `device` gets beside the constants."""
        return ()

    def slots(self) -> dict[str, Slot]:
        """Every constant of this part and how a layer holds it."""
        return {declared.name: self._slot(declared) for declared in self._constants()}

    def symbols(self) -> dict[str, str]:
        return {declared.name: declared.metadata["symbol"] for declared in self._constants()}

    def radii(self) -> list[RadiusLike]:
        """The values of the fields that hold a radius."""
        return [getattr(self, declared.name) for declared in self._constants() if isinstance(declared.default, Radius)]

    def spec(self) -> str:
        return format_call(self, self.name)

    def _constants(self) -> list["dataclasses.Field[Any]"]:
        return [declared for declared in dataclasses.fields(self) if "symbol" in declared.metadata]

    def _slot(self, declared: "dataclasses.Field[Any]") -> Slot:
        value, positive = getattr(self, declared.name), declared.metadata["positive"]
        if isinstance(value, Radius):
            return Slot(value.init, value.learnable, value.per_channel, positive, value.relative, value.floor)
        if isinstance(value, Learnable):
            return Slot(value.init, True, value.per_channel, positive, floor=value.floor)
        is_radius = isinstance(declared.default, Radius)
        return Slot(float(value), self.learnable and not is_radius, positive=positive)

    def _check(self, declared: "dataclasses.Field[Any]", value: Any) -> None:
        what, positive = f"{declared.name} of {self.name}", declared.metadata["positive"]
        is_radius = isinstance(declared.default, Radius)
        if isinstance(value, Radius) and is_radius:
            return
        if isinstance(value, Radius | Learnable) and is_radius == isinstance(value, Learnable):
            raise TypeError(f"{what} must be a number or a {'Radius' if is_radius else 'Learnable'}, not {value!r}")
        check_number(what, getattr(value, "init", value), above=0 if positive else None)
        slot = self._slot(declared)
        if slot.learned and positive:
            check_number(f"learned {what}", slot.init, above=slot.floor)


@dataclass(frozen=True)
class Held:
    """A part in an operator: its constants have the names that a layer gives them, its own with an ending."""

    part: Part
    ending: str
    names: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", {name: name + self.ending for name in self.part.slots()})

    def value(self, argument: Tensor, constants: Mapping[str, Value]) -> Tensor:
        return self.part.value(argument, **{own: constants[name] for own, name in self.names.items()})

    def slots(self) -> dict[str, Slot]:
        return {self.names[own]: slot for own, slot in self.part.slots().items()}

    def equation(self, **symbols: str) -> str:
        """The part's equation: constants by their symbols, whatever else it has by its value."""
        values = {declared.name: getattr(self.part, declared.name) for declared in dataclasses.fields(self.part)}
        return self.part.equation.format(**{**values, **symbols, **self._symbols()})

    def describe(self) -> list[str]:
        """The constants with their values, such as `rho = 1 x mean ||x|| (learned per channel)`."""
        slots = self.part.slots()
        return [f"{symbol} = {slots[own]}" for own, symbol in self._symbols().items()]

    def _symbols(self) -> dict[str, str]:
        return {own: symbol + self.ending for own, symbol in self.part.symbols().items()}


PartType = TypeVar("PartType", bound=type[Part])


def registrar(registry: dict[str, Any], kind: str) -> Callable[[PartType], PartType]:
    """A class decorator that enters a part into the registry under its name."""

    def register(part: PartType) -> PartType:
        if not part.name.isidentifier():
            raise ValueError(f"the name of {kind} must be one word of letters, digits and _, not {part.name!r}")
        if part.name in registry:
            raise ValueError(f"{part.name!r} is taken: {registry[part.name].__name__} is {kind} of that name")
        registry[part.name] = part
        return part

    return register


def format_call(value: Any, name: str) -> str:
    """`name(key=value,...)` with the fields that differ from their defaults, as the spec grammar reads it."""
    changed = [
        f"{declared.name}={_format_value(getattr(value, declared.name))}"
        for declared in dataclasses.fields(value)
        if getattr(value, declared.name) != declared.default
    ]
    return f"{name}({','.join(changed)})" if changed else name


def _format_value(value: Any) -> str:
    if not isinstance(value, Radius | Learnable):
        return repr(value)
    call = format_call(value, type(value).__name__)
    return call if call.endswith(")") else f"{call}()"
