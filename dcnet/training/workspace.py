"""Everything that a run works with: data, network, optimizer, and what is done in a step."""

import inspect
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.optim import Optimizer

from dcnet.data import Dataset, FolderDataset
from dcnet.norm_tracking import sync_norms
from dcnet.optim import WeightedGradients, WeightProjection
from dcnet.training.build import build_model, build_optimizer, set_learning_rate, start_from_, statistics_behind
from dcnet.training.config import RunConfig
from dcnet.training.evaluate import Evaluator
from dcnet.training.execution import Execution, make_accelerator, uses_graph
from dcnet.training.identity import load_data
from dcnet.training.meter import Meter, Reading
from dcnet.training.objective import Objective
from dcnet.training.pretrained import Loaded, start_from_weights
from dcnet.training.runs import Run
from dcnet.training.snapshots import Snapshots
from dcnet.training.sources import make_source
from dcnet.training.state import gather, restore_
from dcnet.training.statistics import forget_norms_, forget_statistics_, start_statistics_
from dcnet.training.step import Step


class Workspace:
    """Made from a config, a folder and a machine; a network or a dataset of one's own may take the config's place.

    A run that does not begin here is given its weights by `restore_`.
    """

    def __init__(
        self,
        config: RunConfig,
        run: Run,
        execution: Execution,
        dataset: Dataset | FolderDataset | None = None,
        model: nn.Module | None = None,
        begins: bool = True,
    ):
        self.config, self.execution, self.begins = config, execution, begins
        self.accelerator = make_accelerator(config, execution, run.folder)
        self.device, self.processes = self.accelerator.device, int(self.accelerator.num_processes)
        self.dataset = dataset or load_data(config, execution.data_dir)
        self.image_size = config.image_size or self.dataset.image_size
        self.loaded: Loaded | None = None
        self.graph = uses_graph(execution, self.accelerator)
        self.model = self._placed(self._new_model() if model is None else model)
        shared = self.accelerator.distributed_type == DistributedType.FSDP
        if shared and config.adversary is not None:
            raise ValueError(f"adversary={config.adversary!r} needs whole weights in each process: use DDP, not FSDP")
        optimizer = build_optimizer(config, self.model, self.device, shared)
        prepared, wrapped = self.accelerator.prepare(self.model, optimizer)
        self.optimizer: Optimizer = wrapped.optimizer
        self.rate = float("nan")
        self.meter = Meter(self.device, self.joined if self.processes > 1 else None, self.is_first)
        # All batches are of one size, or of two with an adversary, and code for any size is slower.
        network: Any = torch.compile(prepared, dynamic=False) if execution.compile else prepared
        objective = Objective(config, self.model, execution.compile)
        self.step = Step(self.accelerator, network, self.optimizer, objective, self.meter)
        share = (self.accelerator.process_index, self.processes)
        self.source = make_source(self.dataset, config, self.device, share, self.graph, execution.workers)
        self.evaluator = Evaluator(self.model, self.device, graph=self.graph)
        count = config.feature_snapshots
        self.snapshots = Snapshots(self.model, self.dataset, count, self.device) if count else None
        self._add_tricks()

    def _new_model(self) -> nn.Module:
        if self.config.network is not None:
            raise ValueError(f"the config is of a custom network, {self.config.model!r}: give it as model=...")
        torch.manual_seed(self.config.seed)
        data = self.dataset
        if len(data.classes) < 2:
            only = ", ".join(data.classes)
            raise ValueError(f"{data.name} has the class {only!r} alone, and every answer is right: expected two")
        if self.config.weights and not self.config.pretrained and self.begins:
            model, self.loaded = start_from_weights(self.config, data, self.image_size, self.device)
            return model
        model = build_model(self.config, len(data.classes), data.channels, self.image_size)
        # A run that goes on has its weights, and the others may be gone or elsewhere by now.
        if self.config.pretrained and self.begins:
            start_from_(model, self.config.pretrained)
            if statistics_behind(self.config.pretrained) != self.config.operator:
                # They are of what these weights gave with another operator.
                forget_statistics_(model)
                forget_norms_(model)
        return model

    def _placed(self, model: nn.Module) -> nn.Module:
        """The network on its device, as the device likes its filters."""
        if self.processes > 1:
            sync_norms(model)
        if self.device.type != "cuda":
            return model.to(self.device)
        # What is not computed in half precision, such as products of filters with each other, may be close to it.
        torch.set_float32_matmul_precision("highest" if self.config.precision == "float32" else "high")
        torch.backends.cudnn.benchmark = True
        return model.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]

    def _add_tricks(self) -> None:
        config = self.config
        self.projection = WeightProjection(self.model, config.projection_every) if config.projection_every else None
        if config.weighted_gradients != "none":
            WeightedGradients(self.model, self.optimizer, on=config.weighted_gradients)

    @property
    def total_steps(self) -> int:
        return self.config.steps or (self.config.epochs or 0) * self.source.steps_per_epoch

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes."""
        return bool(self.accelerator.is_main_process)

    def joined(self, value: Tensor) -> Tensor:
        """The sum over all processes."""
        total: Any = self.accelerator.reduce(value, "sum")
        return total

    def any_process(self, asked: bool) -> bool:
        """Whether it is so in one of the processes; all of them have to ask."""
        if self.processes == 1:
            return asked
        return bool(self.joined(torch.tensor(float(asked), device=self.device)).item() > 0)

    def start_statistics(self) -> None:
        """The first batch, through a network that has seen none."""

        def look() -> None:
            torch.manual_seed(self.config.seed)
            with self.accelerator.autocast():
                self.model(self.source.images(0))

        start_statistics_(self.model, look)

    def train_on(self, step: int, losses: list[float]) -> None:
        """The step of that number, after epochs with these losses."""
        config = self.config
        rate = config.lr * config.schedule.factor(step, self.total_steps, losses)
        if rate != self.rate:
            set_learning_rate(self.optimizer, rate)
            self.rate = rate
        # Whatever is random in a network, such as dropout, is a function of the step as well.
        torch.manual_seed(((config.seed * 1_000_003 + step) * 4_099 + self.accelerator.process_index) % 2**64)
        self.source.train(step, self.step)
        if self.projection is not None:
            self.projection.step()

    def evaluate(self, step: int) -> Reading:
        """How the network does after so many steps; keeps its features where they are asked for."""
        if self.snapshots is not None:
            self.snapshots.take(step)
        return self.evaluator(self.source.test())

    def tensors(self) -> dict[str, Tensor]:
        """All that training changes; all processes have to ask."""
        kept = {} if self.snapshots is None else self.snapshots.state()
        return {**gather(self.model, self.optimizer), **self.meter.state(), **kept}

    def restore_(self, step: int, tensors: dict[str, Tensor]) -> None:
        restore_(self.model, self.optimizer, tensors)
        self.meter.restore_(tensors)
        if self.snapshots is not None:
            self.snapshots.restore_(tensors)
        if self.projection is not None:
            self.projection.count = step

    def described(self) -> dict[str, Any]:
        """What a record says of it."""
        return {
            **({} if self.loaded is None else {"weights": self.loaded.described()}),
            "steps": self.total_steps,
            "steps_per_epoch": self.source.steps_per_epoch,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "execution": {
                "device": self.device.type,
                "graph": self.graph,
                "compile": self.execution.compile,
                "processes": self.processes,
                "strategy": self.accelerator.distributed_type.value,
            },
        }


def check_network(model: nn.Module | None, config: RunConfig) -> None:
    """A custom network, if there is one, has to have a head of its own where the config asks for a margin."""
    if model is None:
        return
    if not isinstance(model, nn.Module):
        raise TypeError(f"a network to train is an nn.Module, not {model!r}")
    if config.margin is not None:
        try:
            inspect.signature(model.forward).bind("images", "labels")
        except TypeError:
            raise ValueError(
                f"margin={config.margin!r} is part of a network whose forward takes images and labels, and gives "
                f"loss and logits, which {type(model).__name__} does not: omit margin, or train a MarginNetwork"
            ) from None
