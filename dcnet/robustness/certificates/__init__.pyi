from dcnet.robustness.certificates.certificate import Certificate, certify, lipschitz, output_bounds

__all__ = [
    "Certificate",
    "certify",
    "lipschitz",
    "output_bounds",
]
