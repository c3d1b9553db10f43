"""Margin losses: a registry of margins, and heads that combine any margin with its loss."""

from dcnet.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
