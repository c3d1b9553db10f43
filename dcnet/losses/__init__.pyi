from dcnet.losses.annealing import Annealing, Automatic
from dcnet.losses.diagnosis import Diagnosis
from dcnet.losses.head import MarginSoftmax
from dcnet.losses.margins import (
    AMSoftmax,
    ArcFace,
    ASoftmax,
    L2Softmax,
    LSoftmax,
    Margin,
    MSoftmax,
    NormFace,
    Softmax,
    SphereFace2,
    SphereFaceR,
    aliases,
    as_margin,
    register,
    registry,
)
from dcnet.losses.sharded import ShardedMarginSoftmax
from dcnet.regularizers import feature_incay

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
