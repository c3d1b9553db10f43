"""How far the values inside a network can move, and between which they lie, layer by layer.

The formulas and why they hold are in docs/robustness_bounds.md. All of it is computed in float64, and each norm is made
larger by `matrices.SLACK`, far more than float64 can lose.
"""

from dcnet.robustness.bounds.signal import Signal
from dcnet.robustness.bounds.walk import visit

__all__ = ["Signal", "visit"]
