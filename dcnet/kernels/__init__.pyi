from dcnet.kernels.dispatch import conv2d, fits, fits_folded, folded, is_plain_eager, use_kernels
from dcnet.kernels.folded_inference import folded_table

__all__ = [
    "conv2d",
    "fits",
    "fits_folded",
    "folded",
    "folded_table",
    "is_plain_eager",
    "use_kernels",
]
