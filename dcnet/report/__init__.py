"""Tables, plots and pages of records, and the tables of `dcnet list`."""

from dcnet.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
