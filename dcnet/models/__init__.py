"""The paper's networks, for plain and decoupled layers; any module of this folder may register more."""

from dcnet.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
