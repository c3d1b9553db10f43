"""The report page: all records as one HTML file, with tables, charts, and the command that measured each number."""

from dcnet.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
