"""Robustness: attacks, corruptions, report cards and certificates."""

from dcnet.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
