"""The forward pass of networks in evaluation, as they were trained and folded, plain and decoupled, in turns."""

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dcnet.bench import check
from dcnet.bench.benchmark import Benchmark, Config, Row, Steps
from dcnet.bench.group import Group
from dcnet.bench.images import placed, random_images
from dcnet.bench.meter import Meter
from dcnet.folding import fold
from dcnet.models import create_model
from dcnet.operator import PLAIN

TRAINING_BATCHES = 3
Model = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class InferenceConfig(Config):
    """What is timed: each network with each operator, trained and folded, and each of them compiled if asked for."""

    networks: list[str]
    width: float
    batch: int
    size: int
    dtype: str
    compile: bool = False


@dataclass(frozen=True)
class Form:
    """A network with an operator, as it was trained or folded, as it is or compiled."""

    operator: str
    folded: bool
    compiled: bool

    def __str__(self) -> str:
        words = {"folded": self.folded, "compiled": self.compiled}
        return ", ".join([self.operator, *(word for word, meant in words.items() if meant)])


class InferenceBenchmark(Benchmark):
    """One group for each network: all operators and forms, against the plain network with its norms folded."""

    name = "inference"

    def __init__(self, config: InferenceConfig, meter: Meter):
        super().__init__(config, meter)
        self.inference = config
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.tolerance = check.NETWORK_TOLERANCES[self.dtype]
        if self.dtype == torch.float32:
            torch.backends.cudnn.allow_tf32 = False

    @property
    def forms(self) -> list[Form]:
        operators = dict.fromkeys((PLAIN, *self.config.operators))
        both = (False, True)
        late = both if self.inference.compile else (False,)
        return [Form(operator, folded, compiled) for compiled in late for operator in operators for folded in both]

    @property
    def step_count(self) -> int:
        return len(self.inference.networks) * (len(self.forms) + self.rounds(self.meter.clocks))

    def prepare(self) -> dict[str, Any]:
        return {"tolerance": self.tolerance}

    def measure(self, steps: Steps) -> Iterator[list[Row]]:
        for network in self.inference.networks:
            yield self._measure_group(network, steps)
            self.meter.free()

    def _measure_group(self, network: str, steps: Steps) -> list[Row]:
        torch._dynamo.reset()
        rows = {str(form): self._row(network, form) for form in self.forms}
        group = Group(self, str(Form(PLAIN, folded=True, compiled=False)), rows, steps)
        images = self._images(TRAINING_BATCHES)
        models: dict[str, Model] = {}
        for form in self.forms:
            steps.say(f"{network}, {form}")
            model = group.attempt(str(form), functools.partial(self._checked, rows[str(form)], form, images))
            models.update({} if model is None else {str(form): model})
            steps.advance()
        steps.say(f"{network}: timing")
        group.time({name: functools.partial(run_model, model, images) for name, model in models.items()}, "forward")
        return list(rows.values())

    def _row(self, network: str, form: Form) -> Row:
        return {"network": network, "operator": form.operator, "folded": form.folded, "compiled": form.compiled}

    def _checked(self, row: Row, form: Form, images: Tensor) -> Model:
        """The network of the row, in which the error of its logits is noted, and whether it is too large."""
        trained = self._trained(row["network"], form.operator)
        exact = run_model(copy.deepcopy(trained).double(), images.double())
        model: nn.Module = (fold(trained) if form.folded else trained).to(self.dtype)
        call: Model = torch.compile(model, dynamic=False) if form.compiled else model
        error = check.relative_error(run_model(call, images), exact)
        row.update(errors=check.finite({"logits": error}), wrong=check.worst({"logits": error}, self.tolerance))
        return call

    def _trained(self, network: str, operator: str) -> nn.Module:
        """A network whose running means and statistics come from a few batches."""
        torch.manual_seed(0)
        config = self.inference
        made = create_model(network, operator, width=config.width, image_size=config.size, norm_momentum=1.0)
        model = placed(made, self.meter.device)
        for seed in range(TRAINING_BATCHES):
            run_model(model, self._images(seed).float())
        return model.eval()

    def _images(self, seed: int) -> Tensor:
        config = self.inference
        return random_images((config.batch, 3, config.size, config.size), self.meter.device, self.dtype, seed)


@torch.no_grad()
def run_model(model: Model, images: Tensor) -> Tensor:
    return model(images)
