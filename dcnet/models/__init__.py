"""The paper's networks, with plain or decoupled layers; any module of this package may register more."""

from dcnet.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
