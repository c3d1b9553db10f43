"""Defines a magnitude, checks it, and trains a plain and a decoupled network on scikit-learn's digits.

One short run with one seed shows that training works, not which network is better.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor

import dcnet
from dcnet.cli.options import Parser, run_program
from dcnet.component import constant
from dcnet.magnitude import Magnitude
from dcnet.parameters import Value
from dcnet.testing import assert_decoupled


@dcnet.magnitude.register
@dataclass(frozen=True)
class Arctan(Magnitude):
    """h(n) = alpha * 2/pi * arctan(n / rho): bounded like tanh, but saturates more slowly."""

    name: ClassVar[str] = "arctan"
    equation: ClassVar[str] = "{scale} 2/pi arctan({n} / {radius})"
    saturates: ClassVar[bool] = True
    scale: dcnet.Constant = constant(1.0, "alpha", positive=True)
    radius: dcnet.RadiusLike = constant(dcnet.Radius(), "rho", positive=True)

    def value(self, n: Tensor, scale: Value, radius: Value) -> Tensor:
        return scale * (2 / torch.pi) * torch.atan(n / radius)


def train(operator: str, epochs: int = 8) -> float:
    """Trains a small CNN-9 and returns its test accuracy in %."""
    torch.manual_seed(0)
    pixels, classes = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(classes)
    order = torch.randperm(len(x))
    train_indices, test_indices = order[:1200], order[1200:]
    model = dcnet.create_model("cnn9-small", operator, 10, width=0.5, in_channels=1, image_size=8)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(epochs):
        for batch in train_indices[torch.randperm(len(train_indices))].split(60):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        return 100 * (model(x[test_indices]).argmax(1) == y[test_indices]).float().mean().item()


def main() -> None:
    Parser(description=__doc__).parse_args()
    layer = dcnet.DecoupledConv2d(4, 6, 3, padding=1, operator="arctan-cos")
    assert_decoupled(layer)
    print("assert_decoupled passed")
    print(layer.operator.properties().equation)
    for operator in ("conv", "arctan-cos"):
        print(f"{operator}: test accuracy {train(operator):.1f} %")


if __name__ == "__main__":
    run_program(main)
