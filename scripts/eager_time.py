"""Shows where the wall time of one decoupled layer in an eager loop goes: `python scripts/eager_time.py` on a GPU.

A small layer is limited by the host, not by the GPU. Python runs the forward pass in the calling thread, and torch runs
the backward pass in a thread of its own. All times are medians in microseconds, with nn.Conv2d beside them.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor, nn

import dcnet
from dcnet.kernels import autograd

CALLS, WARMUP = 200, 20
PHASES = ("before the kernels", "forward", "after them", "to the backward pass", "backward", "return", "release")


def microseconds() -> float:
    return time.perf_counter_ns() / 1000


def wall(call: Callable[[], object], device: str) -> float:
    """The mean time of a call in a loop, with the GPU's work at the end."""
    for _ in range(WARMUP):
        call()
    synchronize(device)
    start = microseconds()
    for _ in range(CALLS):
        call()
    synchronize(device)
    return (microseconds() - start) / CALLS


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@contextmanager
def marked() -> Iterator[list[tuple[float, float]]]:
    """Records start and end of every forward and backward pass of the fused kernels."""
    marks: list[tuple[float, float]] = []

    def timed(function: Callable[..., object]) -> Callable[..., object]:
        def run(*arguments: object) -> object:
            start = microseconds()
            found = function(*arguments)
            marks.append((start, microseconds()))
            return found

        return run

    names = ("run_forward", "run_backward")
    patches = [mock.patch.object(autograd, name, timed(getattr(autograd, name))) for name in names]
    with patches[0], patches[1]:
        yield marks


def phases(layer: nn.Module, x: Tensor, gradient: Tensor) -> dict[str, float] | None:
    """The median time of each phase of a step; None if the layer does not use the fused kernels."""
    found = []
    with marked() as marks:
        for _ in range(CALLS):
            marks.clear()
            start = microseconds()
            output = layer(x)
            made = microseconds()
            gradients = torch.autograd.grad(output, [x, *layer.parameters()], gradient)
            ended = microseconds()
            del output, gradients
            if len(marks) != 2:
                return None
            (first, second), (third, fourth) = marks
            times = (start, first, second, made, third, fourth, ended, microseconds())
            found.append([after - before for before, after in itertools.pairwise(times)])
    return dict(zip(PHASES, map(statistics.median, zip(*found[WARMUP:], strict=True)), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operator", default="tanh-cos")
    parser.add_argument("--shape", type=int, nargs=3, default=(64, 128, 28), metavar=("N", "C", "SIDE"))
    given = parser.parse_args()
    device, (count, channels, side) = "cuda" if torch.cuda.is_available() else "cpu", given.shape
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.backends.cudnn.benchmark = True
    x = torch.randn(count, channels, side, side, device=device, dtype=dtype).to(memory_format=torch.channels_last)
    gradient = torch.randn_like(x)
    x.requires_grad_()
    settings = {"padding": 1, "bias": False, "device": device, "dtype": dtype}
    layers = {"nn.Conv2d": nn.Conv2d(channels, channels, 3, **settings)}
    layers[given.operator] = dcnet.DecoupledConv2d(channels, channels, 3, operator=given.operator, **settings)
    for name, layer in layers.items():
        layer.to(memory_format=torch.channels_last)

        def step(layer: nn.Module = layer) -> object:
            return torch.autograd.grad(layer(x), [x, *layer.parameters()], gradient)

        for threads in (True, False):
            with torch.autograd.set_multithreading_enabled(threads):
                where = "backward in a thread of its own" if threads else "backward in the calling thread"
                print(f"{name}, {where}: {wall(step, device):.0f}")
                for phase, value in (phases(layer, x, gradient) or {}).items():
                    print(f"    {phase}: {value:.0f}")


if __name__ == "__main__":
    main()
