"""Trains a small decoupled network on digits, folds it, exports it to ONNX, and runs the file in onnxruntime.

Needs the extra `onnx`.
"""

import numpy as np
import onnxruntime
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import dcnet
from dcnet.cli.options import Parser, one_operator, run_program, whole_number, writable
from dcnet.export import export_onnx
from dcnet.inference.fold_network import fold


def network(operator: str) -> nn.Module:
    return nn.Sequential(
        dcnet.conv2d(1, 32, 3, padding=1, bias=False, operator=operator),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        dcnet.conv2d(32, 64, 3, padding=1, bias=False, operator=operator),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor, epochs: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(30):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()


def main() -> None:
    parser = Parser(description=__doc__)
    about = "operator of the convolutions (%(default)s)"
    parser.add_argument("--operator", type=one_operator, default="tanh-cos", metavar="SPEC", help=about)
    about = "passes over the training images (%(default)s)"
    parser.add_argument("--epochs", type=whole_number(1), default=10, metavar="N", help=about)
    about = "the ONNX file (%(default)s)"
    parser.add_argument("--out", type=writable, default="runs/digits.onnx", metavar="FILE", help=about)
    options = parser.parse_args()

    torch.manual_seed(0)
    pixels, classes = load_digits(return_X_y=True)
    images = (pixels / 16).reshape(-1, 1, 8, 8).astype(np.float32)
    x, x_test, y, y_test = train_test_split(images, classes, train_size=600, random_state=0, stratify=classes)
    model = network(options.operator)
    train(model, torch.from_numpy(x), torch.from_numpy(y), options.epochs)
    with torch.no_grad():
        expected = model.eval()(torch.from_numpy(x_test)).numpy()

    # Folding removes batch normalization and precomputes constants. The export compares the file with torch.
    export_onnx(fold(model), torch.from_numpy(x_test[:8]), options.out)

    session = onnxruntime.InferenceSession(options.out)
    (logits,) = session.run(None, {"input": x_test})
    predicted = logits.argmax(1)
    equal = int((predicted == expected.argmax(1)).sum())
    print(f"wrote {options.out}, {options.out.stat().st_size / 1024:.0f} KiB")
    print(f"test accuracy in onnxruntime: {100 * (predicted == y_test).mean():.1f} %")
    print(f"largest difference of a logit: {np.abs(logits - expected).max():.1e}")
    print(f"torch and onnxruntime agree on {equal} of {len(y_test)} test images")


if __name__ == "__main__":
    run_program(main)
