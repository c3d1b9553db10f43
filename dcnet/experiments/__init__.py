"""The paper's tables as data: the runs behind every number, and the missing runs."""

from dcnet.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
