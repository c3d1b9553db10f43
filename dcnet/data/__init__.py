"""Datasets by name, augmentation and batches; every module in this package may register more datasets."""

from dcnet.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
