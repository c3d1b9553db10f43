"""The paper's tables as data: the runs that each number comes from, and the runs that are missing."""

from dcnet.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
