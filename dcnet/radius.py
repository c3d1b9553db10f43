"""rho, the operator radius: the norm at which a magnitude changes its slope (Section 3.2.4)."""

from dataclasses import dataclass

from dcnet.learnable import FLOOR, check_flag, check_number, take_plain_numbers


@dataclass(frozen=True)
class Radius:
    """rho, fixed or learned, absolute or a multiple of the mean patch norm (Section 3.6).

    A learned radius is stored as r, with rho = r^2 + floor; `init` is the rho a new layer starts with. A relative
    radius multiplies the mean of ||x|| over the batch and its positions, one scalar a layer: the batch's own mean in
    training, with its gradient, and the running mean with `decay` in evaluation. The defaults are the authors' learned
    form; a bare number given as radius means fixed and absolute.
    """

    init: float = 1.0
    learnable: bool = True
    per_channel: bool = True
    relative: bool = True
    decay: float = 0.999
    floor: float = FLOOR

    def __post_init__(self) -> None:
        take_plain_numbers(self)
        for name in ("learnable", "per_channel", "relative"):
            check_flag(f"{name} of a radius", getattr(self, name))
        check_number("floor of a radius", self.floor, above=0)
        check_number("init of a radius", self.init, above=self.floor if self.learnable else 0)
        check_number("decay of a radius", self.decay)
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay of a radius must be in [0, 1), not {self.decay!r}")


RadiusLike = float | Radius
