"""Datasets by name, augmentation and batches; any module of this package may register more datasets."""

from dcnet.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
