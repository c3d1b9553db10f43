"""Margin losses: a registry of margins, and heads that turn any margin into a loss."""

from dcnet.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
