"""Networks for inference: precomputed layers with folded batch normalization."""

from dcnet.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
