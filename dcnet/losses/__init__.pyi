from dcnet.losses.adaptive_margins import AdaFace, CurricularFace, ElasticArcFace, ElasticCosFace, MagFace
from dcnet.losses.annealing import Annealing, Automatic
from dcnet.losses.cosine_margins import (
    AMSoftmax,
    ArcFace,
    ASoftmax,
    CombinedMargin,
    L2Softmax,
    LSoftmax,
    MSoftmax,
    NormFace,
    Softmax,
    SphereFace2,
    SphereFaceR,
    SubCenterArcFace,
    UniFace,
)
from dcnet.losses.diagnosis import Diagnosis
from dcnet.losses.head import MarginSoftmax
from dcnet.losses.margin_logits import apply_margin
from dcnet.losses.margins import Batch, Margin, aliases, as_margin, register, registry
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
