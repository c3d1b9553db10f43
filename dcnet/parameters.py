"""Constants of a layer: fixed or learned, how they are stored and kept positive, and the radius."""

import dataclasses
import math
import numbers
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dcnet.checks import check_flag, check_number

# A learned number that must stay positive is stored as r, with the value r^2 + FLOOR; 1e-4 is the authors' choice.
FLOOR = 1e-4

Value = float | Tensor


def convert_numbers(described: Any) -> None:
    """Converts NumPy numbers in the fields of a frozen dataclass to Python numbers, which print as specs."""
    for declared in dataclasses.fields(described):
        value: Any = getattr(described, declared.name)
        if isinstance(value, numbers.Real) and not isinstance(value, bool):
            plain = int(value) if isinstance(value, numbers.Integral) else float(value)
            object.__setattr__(described, declared.name, plain)


@dataclass(frozen=True)
class Learnable:
    """A learned constant of a magnitude or an angle, one per layer or one per output channel.

    A new layer starts with `init`. A constant that must be positive is stored as r, with the value r^2 + floor.
    """

    init: float = 1.0
    per_channel: bool = False
    floor: float = FLOOR

    def __post_init__(self) -> None:
        convert_numbers(self)
        check_flag("per_channel of a learned constant", self.per_channel)
        check_number("init", self.init)
        check_number("floor", self.floor, above=0)


Constant = float | Learnable


@dataclass(frozen=True)
class Radius:
    """rho, fixed or learned, absolute or a multiple of the mean patch norm (Section 3.6).

    A learned radius is stored as r, with rho = r^2 + floor; a new layer starts with rho = `init`. A relative radius is
    multiplied by the mean of ||x|| over the batch and its positions, one number per layer: the mean of the batch in
    training, with its gradient, and the running mean with `decay` in evaluation. The defaults are the learned form of
    the paper's authors; a number given as radius is fixed and absolute.
    """

    init: float = 1.0
    learnable: bool = True
    per_channel: bool = True
    relative: bool = True
    decay: float = 0.999
    floor: float = FLOOR

    def __post_init__(self) -> None:
        convert_numbers(self)
        for name in ("learnable", "per_channel", "relative"):
            check_flag(f"{name} of a radius", getattr(self, name))
        check_number("floor of a radius", self.floor, above=0)
        check_number("init of a radius", self.init, above=self.floor if self.learnable else 0)
        check_number("decay of a radius", self.decay, least=0, below=1)


RadiusLike = float | Radius


@dataclass(frozen=True)
class Slot:
    """How a layer holds one constant: as a fixed float, or as a learned tensor."""

    init: float
    learned: bool = False
    per_channel: bool = False
    positive: bool = False
    relative: bool = False
    floor: float = FLOOR
    size: int = 1

    def initial(self, channels: int) -> Tensor:
        """The initial stored tensor, on the CPU: [channels], or [size] if all channels share it."""
        stored = math.sqrt(self.init - self.floor) if self.positive else self.init
        return torch.full((channels if self.per_channel else self.size,), stored, device="cpu")

    @property
    def start(self) -> Value:
        """The initial value of the constant, which all channels share."""
        return self.init if self.size == 1 else torch.full((self.size,), self.init, device="cpu")

    def value(self, stored: Tensor) -> Tensor:
        """The constant, from the stored tensor."""
        return stored.square() + self.floor if self.positive else stored

    def __str__(self) -> str:
        text = f"{self.init:g}" + (" x mean ||x||" if self.relative else "")
        return text + (" (learned per channel)" if self.per_channel else " (learned)") if self.learned else text
