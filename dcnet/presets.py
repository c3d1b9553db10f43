"""Layers by their names in papers, each one a choice of operator."""

import dataclasses
import inspect
from typing import Any, ClassVar

from dcnet import magnitude
from dcnet.angle import Angle, Power
from dcnet.layers import DecoupledConv2d
from dcnet.operator import Operator
from dcnet.weighting import Weighting


class _MagnitudeConv2d(DecoupledConv2d):
    """Takes nn.Conv2d's arguments, and by name the magnitude's constants (`scale`, ...), `angle` and `weighting`."""

    kind: ClassVar[type[magnitude.Magnitude]]

    def __init__(
        self, *args: Any, angle: Angle | str = "cos", weighting: Weighting | str = "unweighted", **kwargs: Any
    ):
        names = [declared.name for declared in dataclasses.fields(self.kind)]
        constants = {name: kwargs.pop(name) for name in names if name in kwargs}
        for name in kwargs:
            if name not in inspect.signature(DecoupledConv2d.__init__).parameters or name == "operator":
                own = ", ".join([*names, "angle", "weighting"])
                raise TypeError(f"{type(self).__name__} takes no {name!r}, only {own} and the arguments of nn.Conv2d")
        super().__init__(*args, operator=Operator(self.kind(**constants), angle, weighting), **kwargs)


class SphereConv2d(_MagnitudeConv2d):
    """f = alpha g(theta). Eq. 4."""

    kind = magnitude.Sphere


class BallConv2d(_MagnitudeConv2d):
    """f = alpha min(||x||, rho) / rho g(theta). Eq. 5."""

    kind = magnitude.Ball


class TanhConv2d(_MagnitudeConv2d):
    """f = alpha tanh(||x|| / rho) g(theta). Eq. 6."""

    kind = magnitude.Tanh


class LinearConv2d(_MagnitudeConv2d):
    """f = alpha ||x|| g(theta). Eq. 7."""

    kind = magnitude.Linear


class SegConv2d(_MagnitudeConv2d):
    """f = (alpha ||x|| up to rho, then with slope beta) g(theta). Eq. 8."""

    kind = magnitude.Segmented


class LogConv2d(_MagnitudeConv2d):
    """f = alpha log(1 + ||x||) g(theta). Eq. 9."""

    kind = magnitude.Log


class MixConv2d(_MagnitudeConv2d):
    """f = (alpha ||x|| + beta log(1 + ||x||)) g(theta). Eq. 10."""

    kind = magnitude.Mix


class BcosConv2d(DecoupledConv2d):
    """f = ||x|| |cos(theta)|^(b-1) cos(theta): the B-cos transform (Boehle et al., CVPR 2022), which has no bias."""

    def __init__(self, *args: Any, b: float = 2.0, **kwargs: Any):
        _reject_operator(self, kwargs, "b")
        super().__init__(*args, operator=Operator("linear", Power(p=b)), **_without_bias(args, kwargs))


class SharpenedCosine2d(DecoupledConv2d):
    """f = sign(<w, x>) (|<w, x>| / ((||w|| + q) (||x|| + q)))^p: sharpened cosine similarity, which has no bias."""

    def __init__(self, *args: Any, p: float = 2.0, q: float = 0.0, **kwargs: Any):
        _reject_operator(self, kwargs, "p", "q")
        # |<w, x>| is |cos| times both norms, which leaves the factor (n / (n + q))^p for each norm.
        sharp = Operator(magnitude.Sharp(offset=q, power=p), Power(p=p), "product") if q else None
        operator = sharp or Operator("sphere", Power(p=p))
        super().__init__(*args, operator=operator, **_without_bias(args, kwargs))


def _reject_operator(layer: DecoupledConv2d, given: dict[str, Any], *own: str) -> None:
    if "operator" in given:
        name = type(layer).__name__
        raise TypeError(f"{name} takes no 'operator', only {', '.join(own)} and the arguments of nn.Conv2d")


def _without_bias(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The named arguments, with bias=False unless the caller gives a bias, by name or as the eighth argument."""
    return kwargs if len(args) > 7 else {"bias": False, **kwargs}
