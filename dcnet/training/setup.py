"""Setup of a run: creates data, network, optimizer and training step from a config and the machine."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.optim import Optimizer

from dcnet.environment import commit, default_workers, environment
from dcnet.fuse import fuse
from dcnet.losses.sharded import sharded_heads
from dcnet.modes import search_convolutions
from dcnet.network_norms import sync_norms
from dcnet.optim import WeightedGradients, WeightProjection
from dcnet.training.build import (
    build_model,
    build_optimizer,
    count_parameters,
    exclude_from_ddp_,
    load_run_weights_,
    operator_of_statistics,
    set_learning_rate,
    shards_head,
)
from dcnet.training.config import RunConfig
from dcnet.training.evaluation import Evaluator, Snapshots
from dcnet.training.identity import Data, describe_data, from_folder, load_data
from dcnet.training.initialization import (
    Loaded,
    build_pretrained,
    init_batch_norm_,
    init_whitening_,
    refreshed_statistics,
    reset_batch_norm_,
    reset_mean_norms_,
)
from dcnet.training.processes import process_group_options
from dcnet.training.recipes import command_of
from dcnet.training.record import DataDescription, Record
from dcnet.training.shards import Part, Shards
from dcnet.training.sources import make_source
from dcnet.training.state import MODEL, OPTIMIZER, gather, parts_of, restore_, restore_parts_
from dcnet.training.step import Meter, Objective, Reading, Step, outputs_of

CHECKPOINT_SECONDS = 60.0
# In runs of so many steps or images, a long search for the fastest convolutions pays off.
LONG, MANY_IMAGES = 5_000, 640_000


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Where and how to compute; it does not change the results.

    Attributes:
        device: "auto", "cpu" or "cuda".
        compile: use torch.compile; it takes a minute, which pays off in long runs on a GPU.
        graph: replay the whole step as a CUDA graph; None to do so if there is a single process with a GPU.
        data_dir: folder of the datasets.
        workers: processes that read images from a folder; by default one per core, up to 8.
        checkpoint_every: steps between checkpoints; None to save at the first evaluation after `checkpoint_seconds`.
        checkpoint_seconds: least seconds between checkpoints, if `checkpoint_every` is None.
        tracker: one of accelerate's trackers, such as "tensorboard".
        shard_head: divide the classes of the margin head among the processes; None for False, or for the value with
            which a resumed run was started. With one process it has no effect.
        refresh_batches: also evaluate with running statistics recomputed from this many training batches;
            0 for no such evaluation. Training and its results stay the same.
    """

    device: str = "auto"
    compile: bool = False
    graph: bool | None = None
    data_dir: Path | None = None
    workers: int = field(default_factory=default_workers)
    checkpoint_every: int | None = None
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    tracker: str | None = None
    shard_head: bool | None = None
    refresh_batches: int = 0


def make_accelerator(config: RunConfig, execution: Execution, folder: Path) -> Accelerator:
    """Returns a new accelerator with the precision of the config; it detects other processes by itself."""
    tracker = execution.tracker
    # Otherwise accelerate would only warn, and continue without the tracker.
    if tracker in LOGGER_TYPE_TO_CLASS and tracker not in {found.value for found in get_available_trackers()}:
        raise ValueError(f"tracker {tracker!r} is not installed: install it, or omit it")
    # accelerate has a global state, which would reject another precision in the next run.
    AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
    mixed = "bf16" if config.precision == "bfloat16" else "no"
    # By default accelerate also chooses unsupported devices, such as the GPU of a Mac.
    cpu = execution.device == "cpu" or not torch.cuda.is_available()
    options: dict[str, Any] = {"mixed_precision": mixed, "cpu": cpu, "log_with": tracker, "project_dir": str(folder)}
    accelerator = Accelerator(**options, kwargs_handlers=process_group_options())
    if execution.device == "cuda" and accelerator.device.type != "cuda":
        raise ValueError("device is 'cuda', but torch finds no GPU: use cpu")
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ValueError("FSDP version 1 flattens parameters and loses their names: use --fsdp_version 2")
    if accelerator.gradient_accumulation_steps != 1:
        # Each batch is a step here, but accelerate would still divide the gradient.
        raise ValueError(
            f"accelerate is configured to accumulate gradients over {accelerator.gradient_accumulation_steps} steps, "
            "which is not supported: unset ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
        )
    return accelerator


def uses_graph(model: nn.Module, execution: Execution, accelerator: Accelerator) -> bool:
    """Whether steps are captured as a CUDA graph; raises ValueError if this is requested but impossible."""
    # The number of sampled classes depends on the labels of the batch.
    samples = any(head.sample < 1 for head in sharded_heads(model).values())
    possible = accelerator.device.type == "cuda" and accelerator.num_processes == 1 and not samples
    if execution.graph and not possible:
        raise ValueError(
            "graph is True, but a CUDA graph of the step needs a single process with a GPU, and a head that does not "
            "sample classes: omit it"
        )
    return possible if execution.graph is None else execution.graph


class Setup:
    """Data, network, optimizer and step of a run.

    Args:
        config: what to train.
        folder: the folder of the run, for trackers.
        execution: where and how to compute.
        dataset: a custom dataset; None for the one of the config.
        model: a custom network; None for the one of the config.
        fresh: whether this is a new run; if not, pretrained weights are not loaded, since `restore_` follows.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        execution: Execution,
        dataset: Data | None = None,
        model: nn.Module | None = None,
        fresh: bool = True,
    ):
        self.config, self.execution, self.fresh = config, execution, fresh
        self.accelerator = make_accelerator(config, execution, folder)
        self.device, self.processes = self.accelerator.device, int(self.accelerator.num_processes)
        self.dataset = dataset or load_data(config, execution.data_dir)
        self.image_size = config.image_size or self.dataset.image_size
        self.loaded: Loaded | None = None
        fsdp = self.accelerator.distributed_type == DistributedType.FSDP
        if fsdp and config.adversary is not None:
            raise ValueError(f"adversary={config.adversary!r} does not support FSDP (sharded weights): use DDP")
        model = self._build_model(fsdp) if model is None else model
        self.graph = uses_graph(model, execution, self.accelerator)
        self.model = self._place(model)
        # Whether the processes hold different weights.
        self.sharded = fsdp or any(head.world > 1 for head in sharded_heads(self.model).values())
        exclude_from_ddp_(self.model)
        optimizer = build_optimizer(config, self.model, self.device, fsdp)
        prepared, wrapped = self.accelerator.prepare(self.model, optimizer)
        self.optimizer: Optimizer = wrapped.optimizer
        self.rate = float("nan")
        self.meter = Meter(self.device, self.sum_over_processes if self.processes > 1 else None, self.is_first)
        # There are one or two batch sizes; code with dynamic shapes is slower.
        network: Any = torch.compile(prepared, dynamic=False) if execution.compile else prepared
        objective = Objective(config, self.model)
        every = config.projection_every
        # A projection in every step is a part of the step, and is captured with it.
        inner = WeightProjection(self.model, every) if every == 1 else None
        self.step = Step(
            self.accelerator, network, self.optimizer, objective, self.meter, inner, len(self.dataset.classes)
        )
        self.projection = WeightProjection(self.model, every) if every > 1 else None
        share = (self.accelerator.process_index, self.processes)
        self.source = make_source(self.dataset, config, self.device, share, self.graph, execution.workers)
        self.evaluator = Evaluator(self.model, self.device, self.accelerator.autocast, self.graph)
        count = config.feature_snapshots
        self.snapshots = Snapshots(self.model, self.dataset, count, self.device) if count else None
        if config.weighted_gradients != "none":
            WeightedGradients(self.model, self.optimizer, on=config.weighted_gradients)
        self.total_steps = config.steps or (config.epochs or 0) * self.source.steps_per_epoch
        if self.device.type == "cuda":
            images = self.total_steps * config.batch_size
            search_convolutions(all_plans=self.total_steps >= LONG or images >= MANY_IMAGES)

    def _build_model(self, fsdp: bool) -> nn.Module:
        """Builds the network of the config; for a new run, loads its pretrained weights."""
        config, data = self.config, self.dataset
        if config.network is not None:
            raise ValueError(f"the config has a custom network, {config.model!r}: pass it as model=...")
        torch.manual_seed(config.seed)
        if len(data.classes) < 2:
            only = ", ".join(data.classes)
            raise ValueError(f"{data.name} has only one class, {only!r}: expected two or more")
        sharded = shards_head(config, self.execution.shard_head, self.processes, fsdp)
        if config.weights and not config.pretrained and self.fresh:
            model, self.loaded = build_pretrained(config, data, self.image_size, self.device, sharded)
            return model
        network = build_model(config, len(data.classes), data.channels, self.image_size, sharded)
        if self.fresh:
            init_whitening_(network, data, self.image_size)
        if config.pretrained and self.fresh:
            load_run_weights_(network, config.pretrained)
            if operator_of_statistics(config.pretrained) != config.operator:
                # The running statistics were computed with another operator.
                reset_batch_norm_(network)
                reset_mean_norms_(network)
        return network

    def _place(self, model: nn.Module) -> nn.Module:
        """Moves the network to its device, in the memory layout and with the fused blocks that are fastest there."""
        if self.processes > 1:
            sync_norms(model)
        if self.device.type != "cuda":
            return model.to(self.device)
        # Concerns float32 matrix products, such as those between filters.
        torch.set_float32_matmul_precision("highest" if self.config.precision == "float32" else "high")
        if self.accelerator.distributed_type != DistributedType.FSDP:
            fuse(model)
        return model.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]

    @property
    def is_first(self) -> bool:
        """Whether this is the first process, which writes the files of the run."""
        return bool(self.accelerator.is_main_process)

    def sum_over_processes(self, value: Tensor) -> Tensor:
        total: Any = self.accelerator.reduce(value, "sum")
        return total

    def any_process(self, value: bool) -> bool:
        """Whether the value is true in any process; all processes must call this."""
        if self.processes == 1:
            return value
        return bool(self.sum_over_processes(torch.tensor(float(value), device=self.device)).item() > 0)

    def init_statistics(self) -> None:
        """Initializes the running statistics of a new network with the first batch."""

        init_batch_norm_(self.model, lambda: self._forward(0))

    def _forward(self, step: int, full_size: bool = False) -> None:
        """Runs the training batch of a step through the network, at its size in that step or at the full size."""
        torch.manual_seed(self.config.seed)
        with self.accelerator.autocast():
            outputs_of(self.model, self.source.images(step, full_size))

    def train_step(self, step: int, losses: Sequence[float]) -> None:
        """Runs a training step; `losses` are the training losses of all evaluations so far, for the schedule."""
        config = self.config
        rate = config.lr * config.schedule.factor(step, self.total_steps, losses)
        if rate != self.rate:
            set_learning_rate(self.optimizer, rate)
            self.rate = rate
        # Randomness in the network, such as dropout, is a function of seed, step and process.
        torch.manual_seed(((config.seed * 1_000_003 + step) * 4_099 + self.accelerator.process_index) % 2**64)
        self.source.train(step, self.step)
        if self.projection is not None:
            self.projection.step()

    def evaluate(self, step: int) -> Reading:
        """Evaluates on the test set, and takes a snapshot of the features if the config enables snapshots."""
        if self.snapshots is not None:
            self.snapshots.take(step)
        return self.evaluator(self.source.test())

    def evaluate_refreshed(self) -> Reading | None:
        """Evaluates with refreshed statistics, always from the same batches; returns None if this is switched off."""
        count = self.execution.refresh_batches
        if not count:
            return None
        with refreshed_statistics(self.model, partial(self._forward, full_size=True), count):
            return self.evaluator(self.source.test())

    def tensors(self) -> dict[str, Tensor]:
        """Returns all tensors that training changes; all processes must call this."""
        return {**gather(self.model, self.optimizer), **self._own_tensors()}

    def parts(self) -> dict[str, Part]:
        """Returns the parts that this process holds of all tensors that training changes; all must call this."""
        own = {name: Part.of(value) for name, value in self._own_tensors().items()}
        return {**parts_of(self.model, self.optimizer), **own}

    def _own_tensors(self) -> dict[str, Tensor]:
        """The tensors of training besides those of network and optimizer, the same in all processes."""
        return {**self.meter.state(), **({} if self.snapshots is None else self.snapshots.state())}

    def restore_(self, step: int, shards: Shards) -> None:
        """Loads the tensors of a checkpoint, from any number of processes; all processes must call this."""
        if self.sharded or len(shards.files) > 1:
            restore_parts_(shards, self.model, self.optimizer)
            tensors = {name: shards.read(name) for name in shards.sizes if not name.startswith((MODEL, OPTIMIZER))}
        else:
            tensors = {name: shards.read(name) for name in shards.sizes}
            restore_(self.model, self.optimizer, tensors)
        self.meter.restore_(tensors)
        if self.snapshots is not None:
            self.snapshots.restore_(tensors)
        if self.projection is not None:
            self.projection.count = step

    def new_record(self, network_class: str | None = None) -> Record:
        """Returns the record of the run before its first step."""
        config, data = self.config, describe_data(self.dataset)
        data.image_size, data.train_images = self.image_size, config.train_images or data.train_images
        return Record(
            name=config.name,
            hash=config.hash,
            status="running",
            command=_command(config, data),
            commit=commit(),
            config=config.described(),
            environment=environment(),
            data=data,
            weights=None if self.loaded is None else self.loaded.described(),
            steps=self.total_steps,
            steps_per_epoch=self.source.steps_per_epoch,
            parameters=count_parameters(self.model),
            execution={
                "device": self.device.type,
                "graph": self.graph,
                "compile": self.execution.compile,
                "processes": self.processes,
                "strategy": self.accelerator.distributed_type.value,
                **({"shard_head": True} if self.execution.shard_head else {}),
                **({"refresh_batches": count} if (count := self.execution.refresh_batches) else {}),
            },
            network_class=network_class,
            given=frozenset(("command", "commit", "results")),
        )


def _command(config: RunConfig, data: DataDescription) -> str | None:
    """Returns a command that trains the same run; None for custom networks and datasets."""
    if config.network is not None or (config.data is not None and not from_folder(config.dataset)):
        return None
    words = [command_of(config)]
    if data.folder:
        words += ["--data-dir", shlex.quote(data.folder)]
    return " ".join([*words, "--skip-bad-images"] if data.skipped else words)
