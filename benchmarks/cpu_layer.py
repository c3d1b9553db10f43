"""Times forward and backward of decoupled convolutions on the CPU against nn.Conv2d, once their results are right."""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from timing import summarize, time_cells, time_rounds
from torch import Tensor, nn

import dcnet
from dcnet.files import write_json
from dcnet.report.environment import environment
from dcnet.report.options import Parser, at_least, operators, run, writable

OPERATORS = "tanh(radius=8.0)-cos,linear-cos,linear-cos+linear,sphere-cos,tanh-cos"
# float32 against float64: the largest difference, as a part of the largest value.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Config:
    """What is timed: 3x3 layers or others, stride 1, padded to keep the size, as many filters as channels."""

    operators: list[str]
    batch: int = 32
    channels: int = 64
    size: int = 32
    kernel: int = 3
    threads: int = torch.get_num_threads()
    repeats: int = 20
    warmup: int = 3
    compile: bool = False


@dataclass(frozen=True)
class Variant:
    """One row of the table: a layer, and the way it is called."""

    name: str
    layer: nn.Conv2d
    call: Callable[[Tensor], Tensor]


def variants(config: Config) -> Iterator[Variant]:
    """torch's own layer, then every operator; with `compile`, the first of them once more, compiled."""
    for operator in dict.fromkeys([dcnet.PLAIN, *config.operators]):
        torch.manual_seed(0)
        shape = (config.channels, config.channels, config.kernel)
        layer = dcnet.conv2d(*shape, padding=config.kernel // 2, bias=False, operator=operator)
        layer.weight.data = layer.weight.data.to(memory_format=torch.channels_last)
        yield Variant(operator, layer, layer)
        if config.compile and operator == config.operators[0]:
            yield Variant(f"{operator}, compiled", layer, torch.compile(layer))


def naive(layer: nn.Conv2d, input: Tensor) -> Tensor:
    """f(w, x) in float64, from patches written out in full: every cosine is formed, and every norm for itself."""
    patches = F.unfold(input.double(), layer.kernel_size, padding=layer.kernel_size[0] // 2)
    filters = layer.weight.double().flatten(1)
    product = filters @ patches
    if isinstance(layer, dcnet.DecoupledConv2d):
        w_norm = (filters.square().sum(1, keepdim=True) + layer.eps).sqrt()
        x_norm = (patches.square().sum(1, keepdim=True) + layer.eps).sqrt()
        product = _decouple(layer, product / (w_norm * x_norm), w_norm, x_norm)
    return product.unflatten(2, input.shape[2:])


def _decouple(layer: dcnet.DecoupledConv2d, cos: Tensor, w_norm: Tensor, x_norm: Tensor) -> Tensor:
    op = layer.operator
    of_filters = {
        name: value.double().view(-1, 1) if isinstance(value, Tensor) and op.slots[name].size == 1 else value
        for name, value in layer.constants().items()
    }
    of_patches = {
        name: value * x_norm.mean() if op.slots[name].relative else value for name, value in of_filters.items()
    }
    h = op.h(op.weighting.argument(w_norm, x_norm), of_patches)
    factor = op.weighting.factor(w_norm, lambda norm: op.h(norm, of_filters), of_filters.get("scale", 1.0))
    return factor * h * op.g(cos, of_filters)


def error(variant: Variant, config: Config) -> float:
    """The largest deviation of output and gradients from the naive formulation, as a part of the largest value."""
    x, gradient = make_input(config)
    results = []
    for output in (variant.call(x), naive(variant.layer, x)):
        gradients = torch.autograd.grad(output, [x, *variant.layer.parameters()], gradient.to(output))
        results.append([output.detach(), *gradients])
    return max(float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in zip(*results, strict=True))


def make_input(config: Config) -> tuple[Tensor, Tensor]:
    """An input that asks for its gradient, and the gradient that comes back to the output."""
    generator = torch.Generator().manual_seed(1)
    shape = (config.batch, config.channels, config.size, config.size)
    x, gradient = (torch.randn(shape, generator=generator).to(memory_format=torch.channels_last) for _ in range(2))
    return x.requires_grad_(), gradient


def time_once(variant: Variant, x: Tensor, gradient: Tensor) -> float:
    """The milliseconds of one forward and backward pass."""
    x.grad = None
    variant.layer.zero_grad()
    start = time.perf_counter()
    variant.call(x).backward(gradient)
    return 1000 * (time.perf_counter() - start)


def time_all(rows: Sequence[Variant], config: Config) -> dict[str, list[float]]:
    """The milliseconds of every variant in every round."""
    x, gradient = make_input(config)
    calls = {row.name: functools.partial(time_once, row, x, gradient) for row in rows}
    return time_rounds(calls, config.warmup, config.repeats)


def kept_for_backward(variant: Variant, config: Config) -> float:
    """The MiB that the forward pass leaves for the backward pass, input and filters included."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        # Held to the end, or what it keeps would be freed and its place used again.
        _output = variant.call(make_input(config)[0])
    return sum(kept.values()) / 2**20


def make_table(config: Config, results: dict[str, Any]) -> Table:
    shape = f"N{config.batch} C{config.channels} {config.size}x{config.size}, {config.kernel}x{config.kernel}"
    table = Table(title=f"forward + backward, {shape}, float32, {config.threads} threads")
    table.caption = "kept: what the forward pass leaves in memory for the backward pass"
    table.add_column("operator", overflow="fold")
    for heading in ("ms (quartiles)", "x nn.Conv2d", "kept, MiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, result in results.items():
        table.add_row(name, *time_cells(result), f"{result['kept_mib']:.1f}")
    return table


def read_options(arguments: Sequence[str] | None) -> tuple[Config, Path | None]:
    parser = Parser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    numbers = {
        "batch": (1, "images"),
        "channels": (1, "channels, and filters"),
        "size": (1, "height and width of the images"),
        "kernel": (1, "height and width of the filters, an odd number"),
        "threads": (1, "threads of torch"),
        "repeats": (2, "rounds that count"),
        "warmup": (0, "rounds before those"),
    }
    for name, (least, about) in numbers.items():
        parser.add_argument(f"--{name}", type=at_least(least), default=getattr(Config, name), metavar="N", help=about)
    parser.add_argument("--operators", type=operators, default=OPERATORS, metavar="SPEC,...", help="what is timed")
    parser.add_argument("--compile", action="store_true", help="time the first operator compiled, too")
    parser.add_argument("--json", type=writable, metavar="FILE", help="write all that was measured there")
    options = vars(parser.parse_args(arguments))
    file = options.pop("json")
    if options["kernel"] % 2 == 0:
        parser.error(f"argument --kernel: must be odd, not {options['kernel']}")
    return Config(**options), file


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks, times and shows every variant; gives the exit code."""
    config, file = read_options(arguments)
    torch.set_num_threads(config.threads)
    rows = list(variants(config))
    for row in rows:
        if not (wrong := error(row, config)) <= TOLERANCE:
            print(f"{row.name} is wrong by {wrong:.1e} of its largest value, so it is not timed", file=sys.stderr)
            return 1
    results = summarize(time_all(rows, config), dcnet.PLAIN)
    for row in rows:
        results[row.name]["kept_mib"] = kept_for_backward(row, config)
    Console().print(make_table(config, results))
    if file:
        write_json(file, {"config": asdict(config), "environment": environment(), "results": results})
    return 0


if __name__ == "__main__":
    run(main)
