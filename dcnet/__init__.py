"""Decoupled networks for PyTorch: a layer is a magnitude times an angle, each of them designed or learned."""

from dcnet import angle, functional, magnitude, weighting
from dcnet.layers import (
    DecoupledConv1d,
    DecoupledConv2d,
    DecoupledConv3d,
    DecoupledLinear,
    conv1d,
    conv2d,
    conv3d,
    linear,
)
from dcnet.learnable import Learnable
from dcnet.operator import PLAIN, Operator, Properties, is_plain
from dcnet.radius import Radius

__version__ = "0.1.0"

__all__ = [
    "PLAIN",
    "DecoupledConv1d",
    "DecoupledConv2d",
    "DecoupledConv3d",
    "DecoupledLinear",
    "Learnable",
    "Operator",
    "Properties",
    "Radius",
    "angle",
    "conv1d",
    "conv2d",
    "conv3d",
    "functional",
    "is_plain",
    "linear",
    "magnitude",
    "weighting",
]
