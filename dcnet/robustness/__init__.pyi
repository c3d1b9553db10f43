from dcnet.gradient_attack import Norm, norms
from dcnet.robustness import attack_run as attack_run
from dcnet.robustness import attacks, corruptions, uncertainty
from dcnet.robustness import report_card as report_card
from dcnet.robustness import subject as subject
from dcnet.robustness import task as task
from dcnet.robustness.attacks import Attack, accuracy, as_attack, correct, curve, perturb
from dcnet.robustness.certificates.certificate import Certificate, certify

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
    "uncertainty",
]
