"""Trains a small decoupled network beside its plain twin on scikit-learn's digits, and writes down what came out."""

import itertools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import dcnet
from dcnet.files import write_json
from dcnet.report import plots
from dcnet.environment import environment
from dcnet.report.options import Parser, at_least, operators, run

Images = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Config:
    """The one recipe that every operator is trained with."""

    operators: list[str]
    seeds: list[int]
    epochs: int
    training_images: int = 600
    batch_size: int = 30
    learning_rate: float = 3e-3
    split_seed: int = 0


def load_images(config: Config) -> tuple[Images, Images]:
    """Training and test images, with each class in proportion; few to train on, since all would be too easy."""
    pixels, classes = load_digits(return_X_y=True)
    x = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    train, test = train_test_split(
        range(len(x)), train_size=config.training_images, random_state=config.split_seed, stratify=classes
    )
    y = torch.tensor(classes)
    return (x[train], y[train]), (x[test], y[test])


def network(operator: str) -> nn.Module:
    """Three convolutions and a fully connected layer with the operator, then a plain classifier."""

    def convolution(channels: int, filters: int) -> list[nn.Module]:
        layer = dcnet.conv2d(channels, filters, 3, padding=1, bias=False, operator=operator)
        return [layer, nn.BatchNorm2d(filters), nn.ReLU()]

    return nn.Sequential(
        *convolution(1, 32),
        *convolution(32, 32),
        nn.MaxPool2d(2),
        *convolution(32, 64),
        nn.MaxPool2d(2),
        nn.Flatten(),
        dcnet.linear(64 * 2 * 2, 64, bias=False, operator=operator),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, images: Images, batch_size: int) -> float:
    """Trains on every image once, in random order, and gives the mean loss."""
    model.train()
    losses = []
    for batch in torch.randperm(len(images[0])).split(batch_size):
        x, y = images[0][batch], images[1][batch]
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return statistics.fmean(losses)


@torch.no_grad()
def measure_accuracy(model: nn.Module, images: Images) -> float:
    """The percentage of the images that are classified correctly."""
    x, y = images
    model.eval()
    return 100 * (model(x).argmax(1) == y).float().mean().item()


def train(operator: str, seed: int, config: Config, after_epoch: Callable[[], None]) -> dict[str, Any]:
    """Trains one network; twins of one seed start with the same filters and see the same batches."""
    training_images, test_images = load_images(config)
    torch.manual_seed(seed)
    model = network(operator)
    optimizer = torch.optim.Adam(model.parameters(), config.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.epochs)
    losses, accuracies, start = [], [], time.perf_counter()
    for epoch in range(config.epochs):
        losses.append(train_epoch(model, optimizer, training_images, config.batch_size))
        if not math.isfinite(losses[-1]):
            raise ArithmeticError(f"{operator} with seed {seed} diverged in epoch {epoch + 1}: loss {losses[-1]}")
        accuracies.append(measure_accuracy(model, test_images))
        schedule.step()
        after_epoch()
    return {
        "operator": operator,
        "seed": seed,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": time.perf_counter() - start,
        "curves": {"train_loss": losses, "test_accuracy": accuracies},
        "final": {"train_loss": losses[-1], "test_accuracy": accuracies[-1]},
    }


def train_all(config: Config, console: Console) -> list[dict[str, Any]]:
    """Trains every operator with every seed, in turns."""
    runs = []
    with Progress(console=console) as progress:
        task = progress.add_task("", total=len(config.seeds) * len(config.operators) * config.epochs)
        for seed, operator in itertools.product(config.seeds, config.operators):
            progress.update(task, description=f"{operator}, seed {seed}")
            runs.append(train(operator, seed, config, lambda: progress.advance(task)))
    return runs


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What one operator reached in the last epoch, over its seeds; the best epoch is of no account."""
    accuracies = [run["final"]["test_accuracy"] for run in runs]
    return {
        "parameters": runs[0]["parameters"],
        "test_accuracy_mean": statistics.fmean(accuracies),
        "test_accuracy_deviation": statistics.stdev(accuracies) if len(runs) > 1 else None,
        "seconds_median": statistics.median(run["seconds"] for run in runs),
    }


def make_record(config: Config, runs: list[dict[str, Any]]) -> dict[str, Any]:
    by_operator = {name: [run for run in runs if run["operator"] == name] for name in config.operators}
    return {
        "config": asdict(config),
        "environment": environment(),
        "results": {name: summary(own) for name, own in by_operator.items()},
        "runs": runs,
    }


def make_table(record: dict[str, Any]) -> Table:
    epochs, seeds = record["config"]["epochs"], len(record["config"]["seeds"])
    table = Table("operator", title=f"digits after {epochs} epochs, mean ± deviation of {seeds} seeds")
    for heading in ("parameters", "test accuracy, %", "seconds a run"):
        table.add_column(heading, justify="right")
    for operator, result in record["results"].items():
        deviation = result["test_accuracy_deviation"]
        accuracy = f"{result['test_accuracy_mean']:.2f}" + ("" if deviation is None else f" ± {deviation:.2f}")
        table.add_row(operator, f"{result['parameters']:,}", accuracy, f"{result['seconds_median']:.1f}")
    return table


def write(record: dict[str, Any], folder: Path) -> list[Path]:
    """Writes the record, and draws from it."""
    write_json(folder / "record.json", record)
    histories = {
        name: [run["curves"] for run in record["runs"] if run["operator"] == name] for name in record["results"]
    }
    plots.save(plots.training_curves(histories), folder / "curves.png")
    plots.save(plots.operator_curves(), folder / "operators.png")
    return [folder / name for name in ("record.json", "curves.png", "operators.png")]


def read_options(arguments: Sequence[str] | None) -> tuple[Config, Path]:
    """The recipe and the folder, which is made here: better no training than one whose results have no place."""
    parser = Parser(description=__doc__)
    about = "operator beside plain convolution, such as tanh-cos, which is the default; may be repeated, or a list a,b"
    parser.add_argument("--operator", type=operators, action="extend", metavar="SPEC", help=about)
    about = "passes over the training images (%(default)s)"
    parser.add_argument("--epochs", type=at_least(1), default=30, metavar="N", help=about)
    about = "networks of each operator, each from a seed of its own (%(default)s)"
    parser.add_argument("--seeds", type=at_least(1), default=3, metavar="N", help=about)
    about = "where record and pictures go (%(default)s)"
    parser.add_argument("--out", type=Path, default=Path("runs/digits"), metavar="FOLDER", help=about)
    options = parser.parse_args(arguments)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=options.out).close()
    except OSError as error:
        parser.error(f"cannot write to the folder {str(options.out)!r}: {error.strerror}")
    compared = dict.fromkeys([dcnet.PLAIN, *(options.operator or ["tanh-cos"])])
    return Config([*compared], [*range(options.seeds)], options.epochs), options.out


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains, shows the table and says where the files are; gives the exit code."""
    console = Console()
    try:
        config, folder = read_options(arguments)
        record = make_record(config, train_all(config, console))
        console.print(make_table(record))
        for path in write(record, folder):
            console.print(f"wrote {path}", soft_wrap=True, highlight=False)
    except ArithmeticError as error:
        print(f"digits: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    run(main)
