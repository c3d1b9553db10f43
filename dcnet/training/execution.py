"""How a run is carried out: what may change from one machine to the next, and not what comes out."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import DistributedType

from dcnet.environment import default_workers
from dcnet.training.config import RunConfig

# Enough that an interruption costs little, and seldom enough that writing does not.
CHECKPOINT_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Where and how to compute.

    Attributes:
        device: "auto", "cpu" or "cuda".
        compile: by torch.compile; worth its minute on a GPU in long runs.
        graph: replay the whole step as a CUDA graph; None for wherever it works: one process with one GPU.
        data_dir: folder of the datasets.
        workers: processes that read images from a folder; by default one for each core there is, up to 8.
        checkpoint_every: steps between checkpoints; None for the first evaluation after `checkpoint_seconds`.
        tracker: of accelerate's trackers, such as "tensorboard".
    """

    device: str = "auto"
    compile: bool = False
    graph: bool | None = None
    data_dir: Path | None = None
    workers: int = field(default_factory=default_workers)
    checkpoint_every: int | None = None
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    tracker: str | None = None


def make_accelerator(config: RunConfig, execution: Execution, folder: Path) -> Accelerator:
    """A fresh accelerator, which finds out by itself about other processes, for the config's precision."""
    tracker = execution.tracker
    # accelerate would warn, and go on without it.
    if tracker in LOGGER_TYPE_TO_CLASS and tracker not in {found.value for found in get_available_trackers()}:
        raise ValueError(f"tracker is {tracker!r}, which is not installed here: install it, or omit it")
    # accelerate keeps one state a process, and would refuse another precision in the next run.
    AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
    mixed = "bf16" if config.precision == "bfloat16" else "no"
    # By itself accelerate would take what else it finds, such as the GPU of a Mac, which nothing here is made for.
    cpu = execution.device == "cpu" or not torch.cuda.is_available()
    accelerator = Accelerator(mixed_precision=mixed, cpu=cpu, log_with=tracker, project_dir=str(folder))
    if execution.device == "cuda" and accelerator.device.type != "cuda":
        raise ValueError("device is 'cuda', but torch finds no GPU here: use cpu")
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ValueError("FSDP of version 1 flattens parameters and loses their names: use --fsdp_version 2")
    if accelerator.gradient_accumulation_steps != 1:
        # A step here is one batch, and accelerate would divide its gradient all the same.
        raise ValueError(
            f"accelerate is told to accumulate gradients over {accelerator.gradient_accumulation_steps} steps, and a "
            "step here is one batch: unset ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
        )
    return accelerator


def uses_graph(execution: Execution, accelerator: Accelerator) -> bool:
    """Whether steps are captured."""
    possible = accelerator.device.type == "cuda" and accelerator.num_processes == 1
    if execution.graph and not possible:
        raise ValueError("a CUDA graph of the whole step needs a single process with a GPU")
    return possible if execution.graph is None else execution.graph
