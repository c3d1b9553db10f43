"""Fused kernels for two-dimensional convolutions; README.md beside this derives them and counts what they cost."""

from dcnet.kernels.gate import conv2d, fits, use_kernels

__all__ = ["conv2d", "fits", "use_kernels"]
