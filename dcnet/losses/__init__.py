"""Losses that make angles the thing that is learned: margins in one registry, and one head that takes any of them."""

from dcnet.losses.annealing import Annealing, Automatic
from dcnet.losses.diagnosis import Diagnosis
from dcnet.losses.head import MarginSoftmax
from dcnet.losses.incay import feature_incay
from dcnet.losses.margin import Margin, aliases, as_margin, register, registry
from dcnet.losses.margins import (
    AMSoftmax,
    ArcFace,
    ASoftmax,
    L2Softmax,
    LSoftmax,
    MSoftmax,
    NormFace,
    Softmax,
)
from dcnet.losses.sharded import ShardedMarginSoftmax
from dcnet.losses.spherefaces import SphereFace2, SphereFaceR

__all__ = [
    "AMSoftmax",
    "ASoftmax",
    "Annealing",
    "ArcFace",
    "Automatic",
    "Diagnosis",
    "L2Softmax",
    "LSoftmax",
    "MSoftmax",
    "Margin",
    "MarginSoftmax",
    "NormFace",
    "ShardedMarginSoftmax",
    "Softmax",
    "SphereFace2",
    "SphereFaceR",
    "aliases",
    "as_margin",
    "feature_incay",
    "register",
    "registry",
]
