"""One HTML page of all records: tables, charts, and the command behind each number."""

from dcnet.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
