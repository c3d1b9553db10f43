"""Decoupled networks for PyTorch: a layer is a magnitude times an angle, each of them designed or learned."""

from dcnet import interrupts  # noqa: F401  # first, since it handles Ctrl-C while torch is imported
from dcnet.lazy import attach

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = attach(__name__, __file__)
