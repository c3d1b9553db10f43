"""f(w, x) = h(||w||, ||x||) * g(theta): a magnitude, an angle and a weighting, as one description (Eq. 3)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import dcnet.angle
import dcnet.magnitude
import dcnet.weighting
from dcnet.angle import Angle
from dcnet.component import Term
from dcnet.magnitude import Magnitude, Sum, every
from dcnet.parameters import Radius, RadiusLike, Slot, Value
from dcnet.spec import SpecReader
from dcnet.weighting import Weighting

# The operator of torch's own layers: dcnet.conv2d and dcnet.linear build nn.Conv2d and nn.Linear for it.
PLAIN = "conv"

REGISTRIES = (dcnet.magnitude.registry, dcnet.angle.registry, dcnet.weighting.registry)

GRAMMAR = "magnitude(key=value,...)[&magnitude...]-angle(...)[+weighting]"


@dataclass(frozen=True)
class Properties:
    """Properties of an operator; None if unknown or not the same in every layer.

    `bound` is the largest |f| before the bias, `radius` the magnitude's radius, or a tuple of radii for a sum.
    """

    bounded: bool | None
    bound: float | None
    smooth: bool | None
    radius: RadiusLike | tuple[RadiusLike, ...] | None
    equation: str


@dataclass(frozen=True, init=False, repr=False)
class Operator:
    """An immutable description of f(w, x) = h(||w||, ||x||) * g(theta).

    Magnitude and angle are objects, names such as "tanh", or custom functions of the norm and of the cosine. Learned
    constants belong to the layers that are built from the description; `str(operator)` parses back.

    `slots` says how a layer holds each constant, by its name there (`radius`; `radius_0`, `radius_1` in a sum). `decay`
    is the decay of the running mean norm, or None without a relative radius. `norm_cancels` says that h = alpha n
    and that g is homogeneous: n cancels, so that layers use 1 for it.
    """

    magnitude: Magnitude | Sum
    angle: Angle
    weighting: Weighting
    slots: dict[str, Slot] = field(init=False, compare=False)
    decay: float | None = field(init=False, compare=False)
    magnitude_terms: tuple[Term, ...] = field(init=False, compare=False)
    angle_term: Term = field(init=False, compare=False)
    norm_cancels: bool = field(init=False, compare=False)
    _spec: str = field(init=False, compare=False)

    def __init__(
        self,
        magnitude: Magnitude | Sum | str | Callable[[Tensor], Tensor],
        angle: Angle | str | Callable[[Tensor], Tensor] = "cos",
        weighting: Weighting | str = "unweighted",
    ):
        set_once = functools.partial(object.__setattr__, self)
        set_once("magnitude", _magnitude(magnitude))
        set_once("angle", _angle(angle))
        set_once("weighting", _weighting(weighting))
        # Gathered once, because every forward pass reads them.
        parts = self.magnitude.parts
        terms = tuple(Term(part, f"_{i}" if len(parts) > 1 else "") for i, part in enumerate(parts))
        set_once("magnitude_terms", terms)
        set_once("angle_term", Term(self.angle))
        set_once("norm_cancels", self.angle.homogeneous and all(part.proportional for part in parts))
        suffix = f"+{self.weighting.name}" if self.weighted else ""
        set_once("_spec", f"{self.magnitude.spec()}-{self.angle.spec()}{suffix}")
        set_once("slots", self._gather_slots())
        set_once("decay", self._find_decay())
        if self.weighting.divides and self._scale_slot is not None and self._scale_slot.init == 0:
            raise ValueError(f"{str(self)!r} divides by the scale of its magnitude, which must not be 0")

    @classmethod
    def parse(cls, text: str) -> Operator:
        """The operator of a spec such as `seg(slope=0.2)-sqcos+linear`."""
        if not isinstance(text, str):
            raise TypeError(f"an operator is an Operator or a spec such as 'tanh-cos', not {text!r}")
        if text.strip() == PLAIN:
            raise ValueError(f"{text!r} is torch's own layer, not a decoupled operator: use dcnet.conv2d or nn.Conv2d")
        if torch.compiler.is_compiling():
            return cls(*_read(text))
        changes = (registry.changes for registry in REGISTRIES)
        return _parse(cls, text, *changes)  # type: ignore[arg-type]  # mypy takes the class for an instance

    def __str__(self) -> str:
        return self._spec

    def __repr__(self) -> str:
        return f"Operator({str(self)!r})"

    @property
    def weighted(self) -> bool:
        """Whether the norm of the filter matters: if not, filters can be projected to any norm."""
        return self.weighting.weighted

    @property
    def learned(self) -> dict[str, Slot]:
        """The constants that a layer owns."""
        return {name: slot for name, slot in self.slots.items() if slot.learned}

    def constants(self, stored: Mapping[str, Tensor]) -> dict[str, Value]:
        """Every constant, from the tensors that a layer stores; constants without a tensor have their initial value."""
        return {name: slot.value(stored[name]) if name in stored else slot.start for name, slot in self.slots.items()}

    def h(self, n: Tensor, constants: Mapping[str, Value]) -> Tensor:
        """The magnitude of the norm n, before any weighting."""
        first, *others = self.magnitude_terms
        total = first.component.value(n, **first.own_constants(constants))
        for term in others:
            total = total + term.component.value(n, **term.own_constants(constants))
        return total

    def g(self, cos: Tensor, constants: Mapping[str, Value]) -> Tensor:
        """The angular activation of cos(theta)."""
        return self.angle.value(cos, **self.angle_term.own_constants(constants))

    def factor(self, w_norm: Tensor, constants: Mapping[str, Value]) -> Value:
        """The factor, a function of ||w|| alone, by which the weighting multiplies h(||x||)."""
        h = self.h(w_norm, constants) if self.weighting.uses_magnitude else None
        return self.weighting.factor(w_norm, h, self.alpha(constants))

    def alpha(self, constants: Mapping[str, Value]) -> Value:
        """The scale of the magnitude; 1 for sums and for magnitudes without a scale."""
        return 1.0 if self._scale_slot is None else constants["scale"]

    @property
    def _scale_slot(self) -> Slot | None:
        # An angle may have a constant of that name; in a sum the scales are scale_0, scale_1, ...
        return self.slots["scale"] if "scale" in self.magnitude_terms[0].names.values() else None

    def properties(self) -> Properties:
        """Boundedness, bound, smoothness, radius and equation."""
        radii = tuple(radius for part in self.magnitude.parts for radius in part.radii())
        return Properties(
            bounded=every([self.magnitude.bounded, self.angle.bounded, self.weighting.keeps_bound]),
            bound=self._bound(),
            smooth=every([self.magnitude.smooth, self.angle.smooth]),
            radius=radii[0] if len(radii) == 1 else radii or None,
            equation=self._equation(),
        )

    def _gather_slots(self) -> dict[str, Slot]:
        slots: dict[str, Slot] = {}
        for term in (*self.magnitude_terms, self.angle_term):
            for name, slot in term.slots().items():
                if name in slots:
                    raise ValueError(f"magnitude and angle of {str(self)!r} both have a constant named {name!r}")
                slots[name] = slot
        return slots

    def _find_decay(self) -> float | None:
        radii = [radius for part in self.magnitude.parts for radius in part.radii()]
        decays = {radius.decay for radius in radii if isinstance(radius, Radius) and radius.relative}
        if len(decays) > 1:
            raise ValueError(f"a layer has one running mean norm, but {str(self)!r} has the decays {sorted(decays)}")
        return decays.pop() if decays else None

    def _bound(self) -> float | None:
        bound = self.magnitude.bound
        if bound is None or not (self.weighting.keeps_bound and self.angle.bounded):
            return None
        return self.weighting.bound(bound, 1.0 if self._scale_slot is None else self._scale_slot.init)

    def _equation(self) -> str:
        def h(n: str) -> str:
            terms = [term.equation(n=n) for term in self.magnitude_terms]
            return terms[0] if len(terms) == 1 else f"({' + '.join(terms)})"

        weighted = self.weighting.equation.format(
            x=h("||x||"), w=h("||w||"), both=h("||w|| ||x||"), scale="1" if self._scale_slot is None else "alpha"
        )
        values = [text for term in (*self.magnitude_terms, self.angle_term) for text in term.describe()]
        return ", ".join([f"f(w, x) = {weighted} {self.angle_term.equation()}", *values])


def as_operator(given: Operator | str) -> Operator:
    """The operator itself, or the one of a spec."""
    return given if isinstance(given, Operator) else Operator.parse(given)


def is_plain(operator: Operator | str) -> bool:
    """Whether the operator is "conv", torch's own layer."""
    return isinstance(operator, str) and operator.strip() == PLAIN


@functools.lru_cache(maxsize=1000)
def _parse(cls: type[Operator], text: str, *changes: int) -> Operator:
    """The operator of a spec, cached until the `changes` of a registry grow: tables parse the same specs often."""
    return cls(*_read(text))


def _read(text: str) -> tuple[Magnitude | Sum, Angle, str]:
    spec = SpecReader(text, "operator", GRAMMAR)
    magnitude = _read_magnitude(spec)
    spec.take("-")
    angle = spec.call(dcnet.angle.registry)
    weighting = spec.word("a weighting") if spec.skip("+") else "unweighted"
    spec.end()
    return magnitude, angle, weighting


def _read_magnitude(spec: SpecReader) -> Magnitude | Sum:
    magnitude: Magnitude | Sum = spec.call(dcnet.magnitude.registry)
    while spec.skip("&"):
        magnitude = magnitude + spec.call(dcnet.magnitude.registry)
    return magnitude


def _read_part(text: str, read: Callable[[SpecReader], Any], kind: str) -> Any:
    """Parses a magnitude or an angle; raises ValueError if more text follows."""
    spec = SpecReader(text, kind.split()[-1], GRAMMAR)
    part = read(spec)
    if spec.peek():
        raise ValueError(f"{text!r} is more than {kind}: use dcnet.Operator.parse for whole specs")
    return part


def _is_function(given: Any) -> bool:
    if isinstance(given, nn.Module) and any(True for _ in given.state_dict()):
        raise TypeError(f"{given} has parameters or buffers, which no layer would own: write a class with constants")
    return callable(given) and not isinstance(given, type)


def _magnitude(given: Any) -> Magnitude | Sum:
    if isinstance(given, str):
        given = _read_part(given, _read_magnitude, "a magnitude")
    if isinstance(given, Magnitude | Sum):
        return given
    if _is_function(given):
        return dcnet.magnitude.Custom(given)
    raise TypeError(f"a magnitude is a Magnitude, its name or a function of the norm, not {given!r}")


def _angle(given: Any) -> Angle:
    if isinstance(given, str):
        given = _read_part(given, lambda spec: spec.call(dcnet.angle.registry), "an angle")
    if isinstance(given, Angle):
        return given
    if _is_function(given):
        return dcnet.angle.Custom(given)
    raise TypeError(f"an angle is an Angle, its name or a function of the cosine, not {given!r}")


def _weighting(given: Any) -> Weighting:
    if isinstance(given, Weighting):
        return given
    if not isinstance(given, str):
        raise TypeError(f"a weighting is one of {', '.join(dcnet.weighting.registry)}, not {given!r}")
    return dcnet.weighting.registry[given]
