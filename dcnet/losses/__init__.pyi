from dcnet.losses.adaptive_margins import AdaFace, CurricularFace, ElasticArcFace, ElasticCosFace, MagFace
from dcnet.losses.annealing import Annealing, Automatic
from dcnet.losses.binary_margins import SphereFace2, UniFace
from dcnet.losses.diagnosis import Diagnosis
from dcnet.losses.head import MarginSoftmax
from dcnet.losses.margin_logits import apply_margin
from dcnet.losses.margins import (
    AMSoftmax,
    ArcFace,
    ASoftmax,
    Batch,
    CombinedMargin,
    L2Softmax,
    LSoftmax,
    Margin,
    MSoftmax,
    NormFace,
    Softmax,
    SphereFaceR,
    SubCenterArcFace,
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
    "AdaFace",
    "Annealing",
    "ArcFace",
    "Automatic",
    "Batch",
    "CombinedMargin",
    "CurricularFace",
    "Diagnosis",
    "ElasticArcFace",
    "ElasticCosFace",
    "L2Softmax",
    "LSoftmax",
    "MSoftmax",
    "MagFace",
    "Margin",
    "MarginSoftmax",
    "NormFace",
    "ShardedMarginSoftmax",
    "Softmax",
    "SphereFace2",
    "SphereFaceR",
    "SubCenterArcFace",
    "UniFace",
    "aliases",
    "apply_margin",
    "as_margin",
    "feature_incay",
    "register",
    "registry",
]
