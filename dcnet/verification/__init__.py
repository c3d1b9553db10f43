"""Verification and identification of people and classes that a network was not trained on."""

from dcnet.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
