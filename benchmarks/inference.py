"""Times networks in evaluation, as they were trained and folded, plain and decoupled, once the results agree."""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from timing import summarize, time_cells, time_rounds
from torch import Tensor, nn

import dcnet
from dcnet.files import write_json
from dcnet.folding import fold
from dcnet.models import create_model, networks
from dcnet.report.environment import environment
from dcnet.report.options import Parser, above_zero, at_least, operators, run, writable

Model = Callable[[Tensor], Tensor]

OPERATORS = "tanh-cos"
NETWORKS = "cnn9,resnet32"
# float32 against float32: the largest difference of a logit, as a part of the largest.
TOLERANCE = 1e-4
TRAINING_BATCHES = 3


@dataclass(frozen=True)
class Config:
    """What is timed: the forward pass of these networks in evaluation, channels last, without gradients."""

    networks: list[str]
    operators: list[str]
    width: float = 0.5
    batch: int = 32
    size: int = 32
    threads: int = torch.get_num_threads()
    repeats: int = 20
    warmup: int = 3
    compile: bool = False


def make_images(config: Config, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(config.batch, 3, config.size, config.size, generator=generator)
    return images.to(memory_format=torch.channels_last)


def trained(name: str, operator: str, config: Config) -> nn.Module:
    """A network whose running means and statistics come from a few batches, in the order of memory that is faster."""
    torch.manual_seed(0)
    model = create_model(name, operator, width=config.width, image_size=config.size, norm_momentum=1.0)
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.to(memory_format=torch.channels_last)
    with torch.no_grad():
        for seed in range(TRAINING_BATCHES):
            model(make_images(config, seed))
    return model.eval()


def variants(name: str, config: Config) -> dict[str, Model]:
    """Every operator as it was trained, and folded; with `compile`, each of them compiled, too."""
    models: dict[str, Model] = {}
    for operator in dict.fromkeys([dcnet.PLAIN, *config.operators]):
        model = trained(name, operator, config)
        models[operator], models[f"{operator}, folded"] = model, fold(model)
    compiled = {f"{label}, compiled": torch.compile(model) for label, model in models.items() if config.compile}
    return {**models, **compiled}


@torch.no_grad()
def error(model: Model, reference: Model, images: Tensor) -> float:
    """The largest difference of a logit, as a part of the largest logit."""
    expected = reference(images)
    return float((model(images) - expected).abs().max() / expected.abs().max())


@torch.no_grad()
def time_once(model: Model, images: Tensor) -> float:
    """The milliseconds of one forward pass."""
    start = time.perf_counter()
    model(images)
    return 1000 * (time.perf_counter() - start)


def measure(name: str, config: Config) -> dict[str, Any]:
    """Checks every variant of a network against the network as it was trained, and times them in turns."""
    models, images = variants(name, config), make_images(config, TRAINING_BATCHES)
    for label, model in models.items():
        if not (wrong := error(model, models[label.partition(", ")[0]], images)) <= TOLERANCE:
            raise ArithmeticError(f"{name} with {label} is wrong by {wrong:.1e} of its largest logit")
    calls = {label: functools.partial(time_once, model, images) for label, model in models.items()}
    return summarize(time_rounds(calls, config.warmup, config.repeats), dcnet.PLAIN)


def make_table(name: str, config: Config, results: dict[str, Any]) -> Table:
    shape = f"width {config.width:g}, N{config.batch} {config.size}x{config.size}"
    table = Table(title=f"forward of {name} in evaluation, {shape}, float32, {config.threads} threads")
    table.add_column("operator", overflow="fold")
    for heading in ("ms (quartiles)", "x conv"):
        table.add_column(heading, justify="right", no_wrap=True)
    for label, result in results.items():
        table.add_row(label, *time_cells(result))
    return table


def network_names(text: str) -> list[str]:
    for name in text.split(","):
        if name not in networks:
            raise argparse.ArgumentTypeError(f"unknown network {name!r}, expected some of {', '.join(networks)}")
    return text.split(",")


def read_options(arguments: Sequence[str] | None) -> tuple[Config, Path | None]:
    parser = Parser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--networks", type=network_names, default=NETWORKS, metavar="NAME,...", help="what is timed")
    parser.add_argument("--operators", type=operators, default=OPERATORS, metavar="SPEC,...", help="beside conv")
    parser.add_argument("--width", type=above_zero, default=Config.width, metavar="W", help="multiplies all channels")
    numbers = {
        "batch": (2, "images"),
        "size": (8, "height and width of the images"),
        "threads": (1, "threads of torch"),
        "repeats": (2, "rounds that count"),
        "warmup": (0, "rounds before those"),
    }
    for name, (least, about) in numbers.items():
        parser.add_argument(f"--{name}", type=at_least(least), default=getattr(Config, name), metavar="N", help=about)
    parser.add_argument("--compile", action="store_true", help="time everything compiled, too")
    parser.add_argument("--json", type=writable, metavar="FILE", help="write all that was measured there")
    options = vars(parser.parse_args(arguments))
    file = options.pop("json")
    return Config(**options), file


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks, times and shows every network; gives the exit code."""
    config, file = read_options(arguments)
    torch.set_num_threads(config.threads)
    results = {}
    for name in config.networks:
        try:
            results[name] = measure(name, config)
        except ArithmeticError as problem:
            print(f"{problem}, so it is not timed", file=sys.stderr)
            return 1
        Console().print(make_table(name, config, results[name]))
    if file:
        write_json(file, {"config": asdict(config), "environment": environment(), "results": results})
    return 0


if __name__ == "__main__":
    run(main)
