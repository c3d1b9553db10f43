"""Training: from a config to a record and trained weights."""

from dcnet.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
