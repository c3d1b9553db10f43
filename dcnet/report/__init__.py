"""Tables and pictures of records and registries."""

from dcnet.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
