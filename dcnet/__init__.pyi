from dcnet import angle, convert, export, functional, losses, magnitude, models, optim, regularizers, testing, weighting
from dcnet import data as data
from dcnet import experiments as experiments
from dcnet import robustness as robustness
from dcnet import training as training
from dcnet import verification as verification
from dcnet.attention import DecoupledAttention
from dcnet.convert import decouple, recouple
from dcnet.fuse import fuse, fusion_report, unfuse
from dcnet.inference.fold_network import fold
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
from dcnet.models import create_model
from dcnet.network_norms import sync_norms, update_norms
from dcnet.operator import PLAIN, Operator, Properties, is_plain
from dcnet.parameters import Constant, Learnable, Radius, RadiusLike
from dcnet.presets import (
    BallConv2d,
    BcosConv2d,
    LinearConv2d,
    LogConv2d,
    MixConv2d,
    SegConv2d,
    SharpenedCosine2d,
    SphereConv2d,
    TanhConv2d,
)

__version__: str
__all__ = [
    "PLAIN",
    "BallConv2d",
    "BcosConv2d",
    "Constant",
    "DecoupledAttention",
    "DecoupledConv1d",
    "DecoupledConv2d",
    "DecoupledConv3d",
    "DecoupledLinear",
    "Learnable",
    "LinearConv2d",
    "LogConv2d",
    "MixConv2d",
    "Operator",
    "Properties",
    "Radius",
    "RadiusLike",
    "SegConv2d",
    "SharpenedCosine2d",
    "SphereConv2d",
    "TanhConv2d",
    "angle",
    "conv1d",
    "conv2d",
    "conv3d",
    "convert",
    "create_model",
    "decouple",
    "export",
    "fold",
    "functional",
    "fuse",
    "fusion_report",
    "is_plain",
    "linear",
    "losses",
    "magnitude",
    "models",
    "optim",
    "recouple",
    "regularizers",
    "sync_norms",
    "testing",
    "unfuse",
    "update_norms",
    "weighting",
]
