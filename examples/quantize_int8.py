"""Trains a small network on digits, folds it, and quantizes it to int8 in onnxruntime.

Needs the extra `onnx`. The record has accuracy, time per batch and file size, in float32 and in int8. Decoupled layers
compute norms and magnitudes in float32 between int8 convolutions, so int8 may be slower.
"""

import functools
import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnxruntime
import torch
import torch.nn.functional as F
from onnxruntime.quantization import CalibrationDataReader, quantize_static
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import dcnet
from dcnet.cli.options import Parser, one_operator, run_program, whole_number, writable
from dcnet.environment import commit, environment
from dcnet.export import export_onnx
from dcnet.files import write_atomically

CHANNELS = 64
REPEATS = 100
Predict = Callable[[Tensor], Tensor]


def network(operator: str) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, CHANNELS, 3, padding=1, bias=False),
        nn.BatchNorm2d(CHANNELS),
        nn.ReLU(),
        dcnet.conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False, operator=operator),
        nn.BatchNorm2d(CHANNELS),
        nn.ReLU(),
        nn.MaxPool2d(2),
        dcnet.conv2d(CHANNELS, 2 * CHANNELS, 3, padding=1, bias=False, operator=operator),
        nn.BatchNorm2d(2 * CHANNELS),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * CHANNELS, 10),
    )


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(30):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()


class Batches(CalibrationDataReader):  # type: ignore[misc]
    """Training images from which onnxruntime measures the ranges of activations."""

    def __init__(self, images: Tensor):
        self.batches: Iterator[Tensor] = iter(images.split(50))

    def get_next(self) -> dict[str, Any] | None:
        batch = next(self.batches, None)
        return None if batch is None else {"input": batch.numpy()}


def export(model: nn.Module, x: Tensor, folder: Path) -> dict[str, Path]:
    """Writes the folded network in float32 and in int8, and returns the files."""
    files = {"float32": folder / "float32.onnx", "int8": folder / "int8.onnx"}
    export_onnx(dcnet.fold(model), x[:2], files["float32"])
    # onnxruntime recommends a preprocessing that folding has already done.
    logging.disable(logging.WARNING)
    kinds = ["Conv", "MatMul", "Gemm"]
    quantize_static(files["float32"], files["int8"], Batches(x), op_types_to_quantize=kinds, per_channel=True)
    logging.disable(logging.NOTSET)
    return files


def load(file: Path) -> Predict:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"input": images.numpy()})[0])


def shortest_times(networks: dict[str, Predict], batch: Tensor) -> dict[str, float]:
    """The shortest times of a call in ms, since other processes only make calls longer; networks take turns."""
    times: dict[str, list[float]] = {name: [] for name in networks}
    for _ in range(REPEATS):
        for name, predict in networks.items():
            start = time.perf_counter()
            predict(batch)
            times[name].append(1000 * (time.perf_counter() - start))
    return {name: min(found) for name, found in times.items()}


def measure(model: nn.Module, x: Tensor, x_test: Tensor, y_test: Tensor, size: int) -> dict[str, Any]:
    """Accuracy, time per batch and file size, in float32 and in int8."""
    with tempfile.TemporaryDirectory() as folder:
        files = export(model, x, Path(folder))
        networks = {name: load(file) for name, file in files.items()}
        times = shortest_times(networks, x_test[:size])
        return {
            name: {
                "test_accuracy": 100 * float((predict(x_test).argmax(1) == y_test).double().mean()),
                "ms": times[name],
                "bytes": files[name].stat().st_size,
            }
            for name, predict in networks.items()
        }


@functools.cache
def digits() -> list[Tensor]:
    """Images and labels for training and test: x, x_test, y and y_test."""
    pixels, classes = load_digits(return_X_y=True)
    images = F.interpolate(torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8), scale_factor=2)
    return train_test_split(images, torch.tensor(classes), train_size=600, random_state=0, stratify=classes)


def main() -> None:
    parser = Parser(description=__doc__)
    about = "operator of the convolutions; repeat the option for several (conv and tanh-cos)"
    parser.add_argument("--operator", type=one_operator, action="append", metavar="SPEC", help=about)
    about = "passes over the training images (%(default)s)"
    parser.add_argument("--epochs", type=whole_number(1), default=10, metavar="N", help=about)
    about = "images per batch (%(default)s)"
    parser.add_argument("--batch", type=whole_number(1), default=32, metavar="N", help=about)
    about = "the record (%(default)s)"
    parser.add_argument("--out", type=writable, default="runs/int8_cpu.json", metavar="FILE", help=about)
    options = parser.parse_args()

    x, x_test, y, y_test = digits()
    rows = {}
    for operator in options.operator or ["conv", "tanh-cos"]:
        torch.manual_seed(0)
        model = network(operator)
        train(model, x, y, options.epochs)
        rows[operator] = measure(model.eval(), x, x_test, y_test, options.batch)
        for name, found in rows[operator].items():
            cost = f"{found['ms']:.2f} ms per batch, {found['bytes'] / 1024:.0f} KiB"
            print(f"{operator}, {name}: test accuracy {found['test_accuracy']:.2f} %, {cost}")
    record = {
        "command": "examples/quantize_int8.py",
        "commit": commit(),
        "onnxruntime": onnxruntime.__version__,
        "environment": environment(),
        "batch": options.batch,
        "rows": rows,
    }
    write_atomically(Path(options.out), json.dumps(record, indent=1).encode() + b"\n")


if __name__ == "__main__":
    run_program(main)
