"""Training steps and inference of whole networks, plain and decoupled, timed in turns."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcnet.bench import correctness
from dcnet.bench.benchmark import Benchmark, Config, Deadline, Group, Row, Steps
from dcnet.bench.correctness import placed, random_images
from dcnet.bench.meter import Clock, Meter
from dcnet.bench.timed_networks import CLASSES, build_network
from dcnet.inference.fold_network import fold
from dcnet.models import create_model
from dcnet.modes import full_precision, search_convolutions
from dcnet.operator import PLAIN
from dcnet.report.network_tables import FORWARD, STEPS


@dataclass(frozen=True, kw_only=True)
class NetworkConfig(Config):
    """Training steps of each network are timed with each operator, batch size and mode.

    With `fuse`, blocks of decoupled networks are fused on a GPU, as `create_model` does. With `check_batch`, only
    that many images are compared with float64. cuDNN times all plans of a convolution, or "ten". No group starts after
    `minutes`.
    """

    models: list[str]
    width: float
    size: int
    batches: list[int]
    modes: list[str]
    precision: str
    fuse: bool = True
    check_batch: int | None = None
    plans: str = "all"
    minutes: float | None = None


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

    def eager(self, images: int | None = None) -> "Training":
        """The same without a compiler, on the first images."""
        return replace(self, call=self.model, images=self.images[:images], labels=self.labels[:images])

    def step(self) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class NetworkBenchmark(Benchmark[NetworkConfig]):
    """A group per mode, network and batch size: the plain network and those of all operators, in turns."""

    name = "network"

    def __init__(self, config: NetworkConfig, meter: Meter):
        dtype = "float32" if config.precision == "float32" else "bfloat16"
        super().__init__(config, meter, dtype, correctness.NETWORK_TOLERANCES)
        if config.device == "cuda":
            search_convolutions(all_plans=config.plans == "all")
        self.deadline = Deadline(config.minutes)

    @property
    def step_count(self) -> int:
        checks = len(self.config.modes) * (1 + len(self.config.operators))
        rounds = sum(self.rounds(self._clocks(mode)) for mode in self.config.modes)
        return len(self.config.models) * len(self.config.batches) * (checks + rounds)

    def measure(self, steps: Steps) -> Iterator[list[Row]]:
        for mode in self.config.modes:
            for model in self.config.models:
                for batch in self.config.batches:
                    yield self._measure_group(model, mode, batch, steps)
                    self.meter.free()

    def summary(self, results: list[Row]) -> dict[str, Any]:
        return {"fastest": STEPS.fastest(results)}

    def _measure_group(self, model: str, mode: str, batch: int, steps: Steps) -> list[Row]:
        torch._dynamo.reset()
        about = {"model": model, "mode": mode, "batch": batch}
        rows: dict[str, Row] = {name: {**about, "operator": name} for name in (PLAIN, *self.config.operators)}
        group = Group(self, PLAIN, rows, steps, f"{model}, batch {batch}, {mode}")
        if late := self.deadline.passed:
            return group.skip(f"{model}, batch {batch}, {mode} was not timed: {late}")
        group.attempt_all(functools.partial(self._time, group, mode))
        for row in rows.values():
            if "ms" in row.get("training", {}):
                row["images_per_s"] = 1000 * batch / row["training"]["ms"]
        return list(rows.values())

    def _time(self, group: Group, mode: str) -> None:
        trainings = group.make(functools.partial(self._checked, group))
        group.time({name: made.step for name, made in trainings.items()}, "training", self._clocks(mode))

    def _clocks(self, mode: str) -> list[Clock]:
        return [self.meter.host_clock if mode == "eager" else self.meter.clocks[0]]

    def _checked(self, group: Group, row: Row) -> Training:
        """Builds a training; stores its memory and the errors of its loss in the row."""
        before = self.meter.allocated_mib()
        training = self._build(row["model"], row["operator"], row["mode"], row["batch"])
        self.note_errors(row, self._errors(training, row))
        group.note_memory(row["operator"], self.meter.memory_mib(training.loss, training.step) - before)
        return training

    def _errors(self, training: Training, row: Row) -> dict[str, float]:
        """The error of the loss; with few checked images, a compiled network is also compared with the eager one.

        The compiled network runs on the whole batch only, since it would be compiled again for another batch size.
        """
        few = self.config.check_batch
        if few is None or few >= row["batch"]:
            return {"loss": correctness.relative_error(training.loss().detach(), exact_loss(training))}
        checked = training.eager(few)
        cudnn = torch.backends.cudnn
        # A search for the fastest convolutions on few images would take longer than all steps.
        with cudnn.flags(cudnn.enabled, deterministic=cudnn.deterministic, allow_tf32=cudnn.allow_tf32):
            loss = checked.loss().detach()
        errors = {"loss": correctness.relative_error(loss, exact_loss(checked))}
        if row["mode"] == "compile":
            eager = training.eager().loss().detach()
            errors["compiled loss"] = correctness.relative_error(training.loss().detach(), eager)
        return errors

    def _build(self, name: str, operator: str, mode: str, batch: int) -> Training:
        torch.manual_seed(0)
        config, device = self.config, self.meter.device
        kind = torch.bfloat16 if config.precision == "pure" else torch.float32
        model = placed(build_network(name, operator, config.width, config.size, config.fuse), device, kind)
        images = random_images((batch, 3, config.size, config.size), device, kind, seed=1)
        labels = torch.randint(CLASSES, (batch,)).to(device)
        # A learning rate so small that the network hardly changes, even after many timed steps.
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
        call = torch.compile(model, dynamic=False) if mode == "compile" else model
        return Training(model, call, optimizer, images, labels, config.precision == "autocast")


@torch.no_grad()
def exact_loss(training: Training) -> Tensor:
    """The loss of the same network in float64."""
    model = copy.deepcopy(training.model).double()
    # Also turns off the search for the fastest convolutions, which takes long in float64.
    with full_precision():
        return F.cross_entropy(model(training.images.double()), training.labels)


TRAINING_BATCHES = 3
Model = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class InferenceConfig(Config):
    """Each network is timed with each operator, trained and folded; with `compile` also compiled."""

    networks: list[str]
    width: float
    batch: int
    size: int
    dtype: str
    compile: bool = False


@dataclass(frozen=True)
class Form:
    """A network with this operator, trained or folded, eager or compiled."""

    operator: str
    folded: bool
    compiled: bool

    def __str__(self) -> str:
        words = {"folded": self.folded, "compiled": self.compiled}
        return ", ".join([self.operator, *(word for word, meant in words.items() if meant)])


class InferenceBenchmark(Benchmark[InferenceConfig]):
    """A group per network: all operators and forms; the base is the folded plain network."""

    name = "inference"

    def __init__(self, config: InferenceConfig, meter: Meter):
        super().__init__(config, meter, config.dtype, correctness.NETWORK_TOLERANCES)

    @property
    def forms(self) -> list[Form]:
        operators = dict.fromkeys((PLAIN, *self.config.operators))
        both = (False, True)
        late = both if self.config.compile else (False,)
        return [Form(operator, folded, compiled) for compiled in late for operator in operators for folded in both]

    @property
    def step_count(self) -> int:
        return len(self.config.networks) * (len(self.forms) + self.rounds(self.meter.clocks))

    def measure(self, steps: Steps) -> Iterator[list[Row]]:
        for network in self.config.networks:
            yield self._measure_group(network, steps)
            self.meter.free()

    def summary(self, results: list[Row]) -> dict[str, Any]:
        return {"fastest": FORWARD.fastest(results)}

    def _measure_group(self, network: str, steps: Steps) -> list[Row]:
        torch._dynamo.reset()
        rows: dict[str, Row] = {str(form): {"network": network, **asdict(form)} for form in self.forms}
        group = Group(self, str(Form(PLAIN, folded=True, compiled=False)), rows, steps, network)
        images = self._images(TRAINING_BATCHES)
        models = group.make(functools.partial(self._checked, images))
        group.time({name: functools.partial(run_model, model, images) for name, model in models.items()}, "forward")
        return list(rows.values())

    def _checked(self, images: Tensor, row: Row) -> Model:
        """The network of the row; stores the error of its logits in the row, and whether it is too large."""
        trained = self._trained(row["network"], row["operator"])
        exact = run_model(copy.deepcopy(trained).double(), images.double())
        model: nn.Module = (fold(trained) if row["folded"] else trained).to(self.dtype)
        call: Model = torch.compile(model, dynamic=False) if row["compiled"] else model
        self.note_errors(row, {"logits": correctness.relative_error(run_model(call, images), exact)})
        return call

    def _trained(self, network: str, operator: str) -> nn.Module:
        """A network with running statistics from a few batches."""
        torch.manual_seed(0)
        config = self.config
        made = create_model(network, operator, width=config.width, image_size=config.size, norm_momentum=1.0)
        model = placed(made, self.meter.device)
        for seed in range(TRAINING_BATCHES):
            run_model(model, self._images(seed).float())
        return model.eval()

    def _images(self, seed: int) -> Tensor:
        config = self.config
        return random_images((config.batch, 3, config.size, config.size), self.meter.device, self.dtype, seed)


@torch.no_grad()
def run_model(model: Model, images: Tensor) -> Tensor:
    return model(images)
