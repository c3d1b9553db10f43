"""Certificates: bounds on the values inside a network, and on how far a perturbation can move them, layer by layer.

The formulas and their derivation are in docs/robustness_bounds.md. All bounds are computed in float64, and each norm is
enlarged by `matrices.SLACK`, far more than the rounding of float64.
"""

from dcnet.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
