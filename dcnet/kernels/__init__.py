"""Fused kernels for two-dimensional convolutions; README.md beside this derives them and counts what they cost."""

from dcnet.kernels.folded import folded_table
from dcnet.kernels.gate import conv2d, fits, fits_folded, folded, plainly_eager, use_kernels

__all__ = ["conv2d", "fits", "fits_folded", "folded", "folded_table", "plainly_eager", "use_kernels"]
