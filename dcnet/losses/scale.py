"""s, which multiplies the cosines: the norm of the feature, a number, or one that is learned."""

import math

import torch
from torch import Tensor, nn

from dcnet.learnable import Learnable, check_number

Scale = float | str | Learnable | None
START = 16.0
LARGEST = torch.finfo(torch.float32).max


class FeatureScale(nn.Module):
    """s of each feature, from its norm.

    Args:
        asked: a number, "norm" for ||x||, "learned" or a Learnable.
        start: of a learned one that does not say where it starts.
    """

    def __init__(self, asked: Scale, start: float | None = None):
        super().__init__()
        # As its logarithm, so that it stays positive.
        self.log: nn.Parameter | None = None
        self.fixed: float | None = None
        if asked is None or asked == "norm":
            return
        if isinstance(asked, str) and asked != "learned":
            raise ValueError(f"scale must be a number, 'norm' or 'learned', not {asked!r}")
        if isinstance(asked, Learnable) and asked.per_channel:
            raise ValueError(f"scale is one number for all classes, Learnable({asked.init!r}), not {asked!r}")
        value = asked.init if isinstance(asked, Learnable) else (start or START) if isinstance(asked, str) else asked
        check_number("scale", value, above=0)
        if value > LARGEST:
            raise ValueError(f"scale must be at most {LARGEST:.2g}, which float32 can hold, not {value!r}")
        self.fixed = float(value)
        if isinstance(asked, str | Learnable):
            self.log = nn.Parameter(torch.tensor(math.log(value)))

    def reset_parameters(self) -> None:
        if self.log is not None and self.fixed is not None:
            nn.init.constant_(self.log, math.log(self.fixed))

    def forward(self, norms: Tensor) -> Tensor:
        """s, of each feature [N] or of all of them []."""
        if self.log is not None:
            # Cast first: in half precision the exponential would have two or three digits.
            return self.log.to(norms.dtype).exp()
        return norms if self.fixed is None else norms.new_full((), self.fixed)

    @property
    def is_norm(self) -> bool:
        return self.fixed is None

    def __str__(self) -> str:
        if self.fixed is None:
            return "||x||"
        return f"{self.fixed:g}" if self.log is None else f"{self.log.exp().item():g} (learned)"
