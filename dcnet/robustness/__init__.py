"""What becomes of a network's answers when somebody, or the weather, changes its images."""

from dcnet.robustness import attacks, corruptions
from dcnet.robustness.accuracy import accuracy, correct
from dcnet.robustness.attack import Attack, as_attack
from dcnet.robustness.certificate import Certificate
from dcnet.robustness.certifying import certify
from dcnet.robustness.curves import curve
from dcnet.robustness.norms import Norm, norms
from dcnet.robustness.perturbing import perturb

__all__ = [
    "Attack",
    "Certificate",
    "Norm",
    "accuracy",
    "as_attack",
    "attacks",
    "certify",
    "correct",
    "corruptions",
    "curve",
    "norms",
    "perturb",
]
