"""Fused Triton kernels for linear layers, 1-D and 2-D convolutions; README.md in this folder has the derivations."""

from dcnet.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
