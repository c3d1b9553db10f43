"""The attacks of the package pyautoattack: AutoAttack, which needs no tuning, and Square, which needs no gradients."""

import importlib
import importlib.util
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dcnet.checks import check_choice, check_whole
from dcnet.gradient_attack import norms
from dcnet.robustness.task import Attack, Task, on_device, register

PACKAGE = "pyautoattack"
NEEDS_PACKAGE = f"needs the package {PACKAGE}: install dcnet with its extra, dcnet[robustness]"
# The names of norms in the package.
THEIR_NORMS = {"linf": "Linf", "l2": "L2"}
# The smallest number of classes for each part.
PARTS = {"apgd-ce": 2, "apgd-t": 4, "fab-t": 2, "square": 2, "apgd-dlr": 3, "fab": 2}
STANDARD = ("apgd-ce", "apgd-t", "fab-t", "square")
# The number of target classes in the standard version.
TARGETS = 9


@dataclass(frozen=True, kw_only=True)
class PackagedAttack(Attack):
    """An attack of the package pyautoattack. Results that exceed the budget by rounding are projected back."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm not in THEIR_NORMS:
            raise ValueError(f"{self.name} supports the norms {', '.join(THEIR_NORMS)}, not {self.norm!r}")

    def images(self, task: Task) -> Tensor:
        # The package creates some tensors on the default device, and expects it to be the CPU.
        with _quiet(task), torch.device("cpu"):
            found = self._found(task, _predictor(task)).to(task.x)
        delta = norms[self.norm].project(found - task.x, task.epsilon)
        return (task.x + delta).clamp(0, 1)

    def _found(self, task: Task, predict: Callable[[Tensor], Tensor]) -> Tensor:
        raise NotImplementedError


@register
@dataclass(frozen=True, kw_only=True)
class AutoAttack(PackagedAttack):
    """APGD on the cross entropy and on targeted DLR, targeted FAB and Square, each on the images that still resist.

    With fewer than ten classes, all other classes are targets; parts that need more classes are left out.

    Attributes:
        norm: "linf" or "l2".
        parts: the attacks in order; by default those of the standard version.
        queries: the number of queries of Square.
    """

    name: ClassVar[str] = "autoattack"
    about: ClassVar[str] = "four attacks without tuning, one after the other"
    takes_targets: ClassVar[bool] = False
    parts: tuple[str, ...] = STANDARD
    queries: int = 5000

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("queries", self.queries, 1)
        for part in self.parts:
            check_choice("part of autoattack", part, PARTS)

    def _found(self, task: Task, predict: Callable[[Tensor], Tensor]) -> Tensor:
        theirs = _package(self).AutoAttack(
            predict, norm=THEIR_NORMS[self.norm], eps=task.epsilon, seed=task.seed, device=task.device
        )
        theirs.attacks_to_run = self._parts(task)
        theirs.square.n_queries = self.queries
        theirs.apgd_targeted.n_target_classes = theirs.fab.n_target_classes = min(TARGETS, task.classes - 1)
        images, labels = _as_package_input(task.x), task.labels.to(task.x.device)
        return theirs.run_standard_evaluation(images, labels, batch_size=task.batch_size)[0]

    def _parts(self, task: Task) -> list[str]:
        possible = [part for part in self.parts if PARTS[part] <= task.classes]
        if not possible:
            raise ValueError(f"none of the parts {', '.join(self.parts)} works with {task.classes} classes: add fab-t")
        if "square" in possible:
            _check_squares(self, task)
        return possible


@register
@dataclass(frozen=True, kw_only=True)
class Square(PackagedAttack):
    """Random squares, kept if they raise the loss. It uses only logits, so vanishing gradients do not mislead it.

    Attributes:
        norm: "linf" or "l2".
        queries: the number of queries in each restart.
        restarts: the number of starts.
    """

    name: ClassVar[str] = "square"
    about: ClassVar[str] = "random squares, without gradients"
    white_box: ClassVar[bool] = False
    queries: int = 5000
    restarts: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("queries", self.queries, 1)
        check_whole("restarts", self.restarts, 1)

    def _found(self, task: Task, predict: Callable[[Tensor], Tensor]) -> Tensor:
        _check_squares(self, task)
        theirs = _package(self).square.SquareAttack(
            predict,
            norm=THEIR_NORMS[self.norm],
            n_queries=self.queries,
            eps=task.epsilon,
            n_restarts=self.restarts,
            seed=task.seed,
            targeted=task.targets is not None,
            device=task.device,
            resc_schedule=False,
        )
        found = [theirs.perturb(_as_package_input(x), wanted).to(task.x.device) for _, x, wanted in task.batches()]
        return torch.cat(found)


def has_package() -> bool:
    """Whether the package is installed."""
    try:
        return importlib.util.find_spec(PACKAGE) is not None
    except ValueError:
        # Raised if sys.modules has None for the package.
        return False


def _package(attack: Attack) -> Any:
    if not has_package():
        raise ModuleNotFoundError(f"{attack.name} {NEEDS_PACKAGE}", name=PACKAGE)
    return importlib.import_module(PACKAGE)


def _check_squares(attack: Attack, task: Task) -> None:
    """Raises ValueError if the first squares, with a fifth of the image's side for l2, do not fit into the images."""
    if task.x.dim() != 4:
        raise ValueError(f"{attack.name} needs images [N, C, H, W], not {list(task.x.shape)}")
    height, width = task.x.shape[2:]
    side = height // 5
    begin = (height - 5 * side) // 2
    beyond = any(side > 1 and begin + length // side * side > length for length in (height, width))
    if attack.norm == "l2" and (side == 0 or beyond):
        raise ValueError(
            f"the squares of pyautoattack do not fit into {height} x {width} pixels with l2: use images of another "
            "size, or the other parts of autoattack"
        )


def _as_package_input(images: Tensor) -> Tensor:
    """The images in float32 and contiguous, since the package flattens them with `view`."""
    return images.float().contiguous()


def _predictor(task: Task) -> Callable[[Tensor], Tensor]:
    """The network as a function from float32 images to float32 logits, whatever its own dtype."""
    network = torch.compile(task.model) if task.compiled else task.model
    return lambda images: network(on_device(images.to(task.x.dtype), task.device)).float()


@contextmanager
def _quiet(task: Task) -> Iterator[None]:
    """Restores the random state and the trace function of the process; messages of the package become warnings."""
    devices = [task.device] if task.device.type == "cuda" else []
    tracing, logger = sys.gettrace(), logging.getLogger("auto-attack")
    propagated, handler = logger.propagate, _Warnings(logging.WARNING)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        sys.settrace(tracing)
        logger.removeHandler(handler)
        logger.propagate = propagated
    for message in dict.fromkeys(handler.messages):
        warnings.warn(f"AutoAttack says: {message}", stacklevel=2)


class _Warnings(logging.Handler):
    """Collects log messages, except those on the number of classes."""

    def __init__(self, level: int):
        super().__init__(level)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage().removesuffix(" See flags_doc.md for details.")
        # `_parts` checks the number of classes; the untargeted DLR loss needs only 3.
        if not message.startswith("with only"):
            self.messages.append(message)
