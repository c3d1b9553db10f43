"""Training steps of whole networks, plain and decoupled, in turns."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcnet.bench import check
from dcnet.bench.benchmark import Benchmark, Config, Row, Steps
from dcnet.bench.group import Group
from dcnet.bench.images import placed, random_images
from dcnet.bench.meter import Clock, Meter
from dcnet.models import create_model
from dcnet.operator import PLAIN

MODES = ("eager", "graph", "compile")
PRECISIONS = {"autocast": torch.bfloat16, "pure": torch.bfloat16, "float32": torch.float32}
CLASSES = 100


@dataclass(frozen=True, kw_only=True)
class NetworkConfig(Config):
    """What is timed: steps of one network with each operator, for each batch size, in each mode."""

    model: str
    width: float
    size: int
    batches: list[int]
    modes: list[str]
    precision: str


@dataclass(frozen=True)
class Training:
    """Forward, cross entropy, backward and a step of SGD with momentum."""

    model: nn.Module
    call: Callable[[Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    images: Tensor
    labels: Tensor
    autocast: bool

    def loss(self) -> Tensor:
        device = self.images.device.type
        with torch.autocast(device, torch.bfloat16) if self.autocast else contextlib.nullcontext():
            logits = self.call(self.images)
        return F.cross_entropy(logits.float(), self.labels)

    def step(self) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class NetworkBenchmark(Benchmark):
    """One group for each mode and batch size: the plain network and those of all operators, in turns."""

    name = "network"

    def __init__(self, config: NetworkConfig, meter: Meter):
        super().__init__(config, meter)
        self.networks = config
        self.dtype = PRECISIONS[config.precision]
        self.tolerance = check.NETWORK_TOLERANCES[self.dtype]
        if self.dtype == torch.float32:
            torch.backends.cudnn.allow_tf32 = False

    @property
    def step_count(self) -> int:
        checks = len(self.networks.modes) * (1 + len(self.config.operators))
        rounds = sum(self.rounds(self._clocks(mode)) for mode in self.networks.modes)
        return len(self.networks.batches) * (checks + rounds)

    def prepare(self) -> dict[str, Any]:
        return {"tolerance": self.tolerance}

    def measure(self, steps: Steps) -> Iterator[list[Row]]:
        for mode in self.networks.modes:
            for batch in self.networks.batches:
                yield self._measure_group(mode, batch, steps)
                self.meter.free()

    def _measure_group(self, mode: str, batch: int, steps: Steps) -> list[Row]:
        torch._dynamo.reset()
        operators = dict.fromkeys((PLAIN, *self.config.operators))
        about = {"model": self.networks.model, "mode": mode, "batch": batch}
        rows: dict[str, Row] = {operator: {**about, "operator": operator} for operator in operators}
        group = Group(self, PLAIN, rows, steps)
        trainings: dict[str, Training] = {}
        for operator in operators:
            steps.say(f"{operator}, batch {batch}, {mode}")
            made = group.attempt(operator, functools.partial(self._checked, group, operator))
            trainings.update({} if made is None else {operator: made})
            steps.advance()
        steps.say(f"batch {batch}, {mode}: timing")
        group.time({name: made.step for name, made in trainings.items()}, "training", self._clocks(mode))
        for row in rows.values():
            note_speed(row)
        return list(rows.values())

    def _clocks(self, mode: str) -> list[Clock]:
        return [self.meter.host_clock if mode == "eager" else self.meter.clocks[0]]

    def _checked(self, group: Group, operator: str) -> Training:
        """A training whose loss and memory are noted in its row, and whether the loss is wrong."""
        row, before = group.rows[operator], self.meter.allocated_mib()
        training = self._build(operator, row["mode"], row["batch"])
        error = check.relative_error(training.loss().detach(), exact_loss(training))
        row.update(errors=check.finite({"loss": error}), wrong=check.worst({"loss": error}, self.tolerance))
        group.note_memory(operator, self.meter.memory_mib(training.loss, training.step) - before)
        return training

    def _build(self, operator: str, mode: str, batch: int) -> Training:
        torch.manual_seed(0)
        config, device = self.networks, self.meter.device
        kind = torch.bfloat16 if config.precision == "pure" else torch.float32
        model = create_model(config.model, operator, CLASSES, width=config.width, image_size=config.size)
        model = placed(model, device, kind)
        images = random_images((batch, 3, config.size, config.size), device, kind, seed=1)
        labels = torch.randint(CLASSES, (batch,)).to(device)
        # Steps so small that the network stays what it is, however often it is timed.
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
        call = torch.compile(model, dynamic=False) if mode == "compile" else model
        return Training(model, call, optimizer, images, labels, config.precision == "autocast")


@torch.no_grad()
def exact_loss(training: Training) -> Tensor:
    """The loss of the same network in float64."""
    model = copy.deepcopy(training.model).double()
    return F.cross_entropy(model(training.images.double()), training.labels)


def note_speed(row: Row) -> None:
    """Adds the images a second to a row that was timed."""
    if "ms" in row.get("training", {}):
        row["images_per_s"] = 1000 * row["batch"] / row["training"]["ms"]
