"""The base of magnitudes and angles: a name, an equation, and constants that a layer holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from torch import Tensor

from dcnet.checks import check_flag, check_number
from dcnet.parameters import Learnable, Radius, RadiusLike, Slot, Value, convert_numbers
from dcnet.spec import format_call


def constant(
    default: float | Radius, symbol: str, positive: bool = False, limits: tuple[float, float] | None = None
) -> Any:
    """Declares a constant: a field that the equation shows as `symbol` and that can be learned.

    Args:
        default: its value in a new layer.
        symbol: its name in equations.
        positive: whether it must be positive.
        limits: the range of its slider in charts.
    """
    return field(default=default, metadata={"symbol": symbol, "positive": positive, "limits": limits})


def belongs_to(part: object, attribute: str, *equations: str) -> bool:
    """Whether the attribute matches the equations: not if a subclass redefines an equation without the attribute."""
    for base in type(part).__mro__:
        if attribute in vars(base):
            return True
        if any(equation in vars(base) for equation in equations):
            return False
    return False


@dataclass(frozen=True)
class Component:
    """One factor of an operator: a magnitude or an angle.

    A subclass states its `name` in specs, its `equation`, its constants as fields made by `constant`, and `value`,
    which receives each constant by the name of its field, as a float or as a tensor that broadcasts against the rest.
    `learnable=True` makes every constant that is given as a plain number learned; a radius has its own setting.

    Optional forms of the equation: `device` for the fused kernels, without which a component is computed in
    eager PyTorch, and `javascript` for charts with sliders: an expression in `n` or `theta`, the constants by the names
    of their fields, and the other fields in braces.
    """

    name: ClassVar[str]
    equation: ClassVar[str]
    device: ClassVar[Any] = None
    javascript: ClassVar[str | None] = None
    learnable: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        convert_numbers(self)
        check_flag(f"learnable of {self.name}", self.learnable)
        for declared in self._constants():
            self._check(declared, getattr(self, declared.name))
        if self.learnable and not any(slot.learned for slot in self.slots().values()):
            raise ValueError(f"learnable=True needs a constant to learn, but {self.name} has none: omit it")

    def value(self, argument: Tensor, *args: Any, **constants: Any) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must define value(argument, **constants)")

    def fixed_numbers(self) -> tuple[float, ...]:
        """Arguments of `device` after the constants: fields that are not constants."""
        return ()

    def slots(self) -> dict[str, Slot]:
        """How a layer holds each constant."""
        return {declared.name: self._slot(declared) for declared in self._constants()}

    def symbols(self) -> dict[str, str]:
        return {declared.name: declared.metadata["symbol"] for declared in self._constants()}

    def radii(self) -> list[RadiusLike]:
        """The values of the fields that hold a radius."""
        return [getattr(self, declared.name) for declared in self._constants() if isinstance(declared.default, Radius)]

    def limits(self) -> dict[str, tuple[float, float]]:
        """The slider range of each constant; a constant without limits has no slider."""
        declared = {each.name: each.metadata["limits"] for each in self._constants()}
        return {name: limits for name, limits in declared.items() if limits is not None}

    def script(self) -> str | None:
        """The equation as a JavaScript expression, if the class has one."""
        if self.javascript is None or not belongs_to(self, "javascript", "value"):
            return None
        return self.javascript.format(**{each.name: getattr(self, each.name) for each in fields(self)})

    def spec(self) -> str:
        return format_call(self, self.name)

    def _constants(self) -> list[dataclasses.Field[Any]]:
        return [declared for declared in fields(self) if "symbol" in declared.metadata]

    def _slot(self, declared: dataclasses.Field[Any]) -> Slot:
        value, positive = getattr(self, declared.name), declared.metadata["positive"]
        if isinstance(value, Radius):
            return Slot(value.init, value.learnable, value.per_channel, positive, value.relative, value.floor)
        if isinstance(value, Learnable):
            return Slot(value.init, True, value.per_channel, positive, floor=value.floor)
        is_radius = isinstance(declared.default, Radius)
        return Slot(float(value), self.learnable and not is_radius, positive=positive)

    def _check(self, declared: dataclasses.Field[Any], value: Any) -> None:
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
class Term:
    """A component of an operator; `names` maps its constants to their names in a layer, which may have a suffix."""

    component: Component
    suffix: str = ""
    names: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", {name: name + self.suffix for name in self.component.slots()})

    def own_constants(self, constants: Mapping[str, Value]) -> dict[str, Value]:
        """The constants of the component by their own names, from those of the operator."""
        return {own: constants[name] for own, name in self.names.items()}

    def slots(self) -> dict[str, Slot]:
        return {self.names[own]: slot for own, slot in self.component.slots().items()}

    def equation(self, **symbols: str) -> str:
        """The equation, with constants by their symbols and other fields by their values."""
        values = {declared.name: getattr(self.component, declared.name) for declared in fields(self.component)}
        return self.component.equation.format(**{**values, **symbols, **self._symbols()})

    def describe(self) -> list[str]:
        """The constants with their values, such as `rho = 1 x mean ||x|| (learned per channel)`."""
        slots = self.component.slots()
        return [f"{symbol} = {slots[own]}" for own, symbol in self._symbols().items()]

    def _symbols(self) -> dict[str, str]:
        return {own: symbol + self.suffix for own, symbol in self.component.symbols().items()}
