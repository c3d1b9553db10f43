"""Benchmarks of layers, heads, training steps and inference, relative to plain PyTorch layers."""

from dcnet.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
