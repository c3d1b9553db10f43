"""Converts any network to a decoupled one and back: selection of layers, calibration, and gradual conversion."""

from dcnet.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
