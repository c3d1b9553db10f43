"""Attacks within a budget on networks that take pixels in [0, 1]; FGSM, BIM and PGD.

Each attack of the registry is a function: `attacks.fgsm(model, x, y, epsilon=8 / 255)` returns images, with the
arguments of `perturb`. `attacks.curve(model, x, y, attack="pgd", epsilons=[...])` returns accuracies.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from inspect import Parameter, Signature
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dcnet.checks import check_choice, check_images, check_labels, check_number, check_whole
from dcnet.data.batches import hash_seed
from dcnet.gradient_attack import LOSSES, Ascent, Best, Goal, Track, as_seed, norms
from dcnet.modes import frozen_eval
from dcnet.robustness.task import (
    BATCH,
    Attack,
    Task,
    accuracy,
    as_attack,
    check_epsilon,
    check_targets,
    classes_of,
    correct,
    device_of,
    register,
    registry,
    share,
)

__all__ = ["Attack", "accuracy", "as_attack", "correct", "curve", "perturb", "register", "registry"]


@torch.inference_mode(False)
@torch.no_grad()
def perturb(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    attack: Attack | str = "pgd",
    *,
    epsilon: float,
    targets: Tensor | None = None,
    source: nn.Module | None = None,
    seed: int | torch.Generator = 0,
    batch_size: int = BATCH,
    compile: bool = False,
    **settings: Any,
) -> Tensor:
    """The adversarial images of an attack on x: in [0, 1] and within epsilon of x.

    Args:
        model: maps pixels to logits [N, classes], with any normalization inside. It is attacked in evaluation mode and
            left unchanged.
        x: images [N, ...], float in [0, 1] or uint8, on any device; the result is on the same device.
        y: their labels, int [N].
        attack: a name of the registry, or an Attack.
        epsilon: the largest perturbation, in the norm of the attack.
        targets: the classes that the model should predict, int [N]; None for any class but the label.
        source: a network to attack in place of the model, for a transfer. Every image then takes all steps, since one
            that only just misleads the source rarely misleads another network.
        seed: seed of all random numbers. The same seed gives the same images for every batch_size, up to rounding; only
            square and autoattack draw per batch.
        batch_size: images attacked at once.
        compile: compile the steps, which pays off in long attacks on a GPU.
        settings: settings of the attack, such as norm="l2" or steps=50.
    """
    chosen = as_attack(attack, **settings)
    if targets is not None and not chosen.takes_targets:
        raise ValueError(f"{chosen.name} does not take targets: use pgd")
    if source is not None:
        chosen = chosen.at_full_strength()
        check_source(model, source, x)
    attacked = model if source is None else source
    with frozen_eval(attacked):
        images = check_images(x)
        budget, size = check_epsilon(epsilon, chosen.norm, images), check_whole("batch_size", batch_size, 1)
        classes, device = classes_of(attacked, images), device_of(attacked, images)
        labels = check_labels("labels", y, len(images), classes)
        aims = check_targets(targets, labels, classes)
        task = Task(attacked, images, labels, aims, budget, as_seed(seed), size, compile, classes, device)
        return images if budget == 0 else chosen.images(task)


def check_source(model: nn.Module, source: nn.Module, x: Tensor) -> None:
    """Raises ValueError for a source with another number of classes."""
    images = check_images(x[:1])
    with frozen_eval(model), frozen_eval(source):
        own, others = classes_of(model, images), classes_of(source, images)
    if own != others:
        raise ValueError(f"the source must have as many classes as the network, {own}, not {others}")


@torch.inference_mode(False)
def curve(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    attack: Attack | str = "pgd",
    *,
    epsilons: Sequence[float],
    targets: Tensor | None = None,
    source: nn.Module | None = None,
    seed: int | torch.Generator = 0,
    batch_size: int = BATCH,
    compile: bool = False,
    each: Callable[[float, float], object] | None = None,
    **settings: Any,
) -> list[float]:
    """The accuracy at each epsilon, in the given order.

    An attack that searches keeps the images found at a smaller epsilon, which are also within the larger one, and
    continues with the other images, so accuracies never rise with epsilon. The other arguments are those of
    `perturb`.

    Args:
        epsilons: the budgets, in any order; 0 means no attack.
        source: a network to attack in place of the model; every epsilon is then independent of the others.
        seed: the same for all epsilons, even if it is a generator.
        each: called with every epsilon and its accuracy, in ascending order.
    """
    chosen, images = as_attack(attack, **settings), check_images(x)
    budgets = [check_epsilon(epsilon, chosen.norm, images) for epsilon in epsilons]
    if not budgets:
        raise ValueError("epsilons is empty: give one number or more")
    with frozen_eval(model):
        classes = classes_of(model, images)
    labels = check_labels("labels", y, len(images), classes).to(images.device)
    aims = check_targets(targets, labels, classes)
    options: dict[str, Any] = {"source": source, "seed": as_seed(seed), "batch_size": batch_size, "compile": compile}
    right, found = torch.ones(len(images), dtype=torch.bool, device=images.device), {}
    for epsilon in sorted(set(budgets)):
        left = right if chosen.searching and source is None else torch.ones_like(right)
        if left.any():
            part = None if aims is None else aims[left]
            moved = perturb(model, images[left], labels[left], chosen, epsilon=epsilon, targets=part, **options)
            right = left.masked_scatter(left, correct(model, moved, labels[left], batch_size=batch_size))
        found[epsilon] = share(right)
        if each is not None:
            each(epsilon, found[epsilon])
    return [found[epsilon] for epsilon in budgets]


@dataclass(frozen=True, kw_only=True)
class GradientAttack(Attack):
    """x <- project(x + step * steepest(gradient)), `steps` times, from each of the starts.

    Attributes:
        norm: "linf" or "l2".
        loss: what to maximize: "ce" is the cross entropy, "margin" the highest other logit minus that of the label,
            "floored" the training loss of the paper, with smoothed labels and a floor inside the logarithm.
        steps: the number of steps.
        step: the length of a step; None for reach * epsilon / steps, where the reach of bim is 2 and that of pgd 2.5.
        restarts: the number of starts; later ones attack the images that the network still classifies correctly.
        momentum: the decay of the accumulated gradient; 0 for none.
        random_start: start at a random point within epsilon.
        early_stop: stop changing an image once the network misclassifies it; otherwise all images take all steps.
    """

    reach: ClassVar[float]
    loss: str = "ce"
    steps: int
    step: float | None = None
    restarts: int = 1
    momentum: float = 0.0
    random_start: bool = False
    early_stop: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("loss", self.loss, LOSSES)
        check_whole("steps", self.steps, 1)
        check_whole("restarts", self.restarts, 1)
        if self.step is not None:
            check_number("step", self.step, above=0)
        check_number("momentum", self.momentum, least=0)
        if self.restarts > 1 and not self.random_start:
            raise ValueError(f"{self.restarts} restarts without random_start are identical: set random_start=True")

    @property
    def searching(self) -> bool:
        return self.early_stop

    def at_full_strength(self) -> Attack:
        return replace(self, early_stop=False) if self.early_stop else self

    def images(self, task: Task) -> Tensor:
        ascent = self._ascent(task)
        found = [self._batch(task, ascent, *batch).to(task.x.device) for batch in task.batches()]
        return torch.cat(found).contiguous()

    def _ascent(self, task: Task) -> Ascent:
        network = torch.compile(task.model) if task.compiled else task.model
        goal = Goal(network, LOSSES[self.loss], task.targets is not None)
        step = self.reach * task.epsilon / self.steps if self.step is None else self.step
        return Ascent(goal, norms[self.norm], task.epsilon, step, self.steps, self.momentum, task.compiled)

    def _batch(self, task: Task, ascent: Ascent, rows: Tensor, x: Tensor, labels: Tensor) -> Tensor:
        places = torch.arange(len(x), device=x.device)
        track = Track(places, x, labels, x, torch.zeros_like(x))
        if self.restarts == 1 and not self.early_stop:
            return ascent(self._started(track, rows, task, 0)).images
        best = Best(x)
        if self.early_stop and self.random_start:
            best.update(places, x, *ascent.goal.evaluate(x, labels))
        for restart in range(self.restarts):
            left = track.without(best.broken)
            if not len(left):
                break
            ascent(self._started(left, rows, task, restart), best, self.early_stop)
        return best.images

    def _started(self, track: Track, rows: Tensor, task: Task, restart: int) -> Track:
        if not self.random_start:
            return track
        noise = norms[self.norm].sample_ball(track.x, rows[track.at], hash_seed(task.seed, restart))
        return replace(track, images=(track.x + task.epsilon * noise).clamp(0, 1))


@register
@dataclass(frozen=True, kw_only=True)
class FGSM(GradientAttack):
    """One step of length epsilon for all images: the fast gradient sign method, and its counterpart for "l2"."""

    name: ClassVar[str] = "fgsm"
    about: ClassVar[str] = "one step along the sign of the gradient"
    reach: ClassVar[float] = 1.0
    steps: int = field(default=1, init=False)
    step: float | None = field(default=None, init=False)
    restarts: int = field(default=1, init=False)
    momentum: float = field(default=0.0, init=False)
    random_start: bool = field(default=False, init=False)
    early_stop: bool = field(default=False, init=False)


@register
@dataclass(frozen=True, kw_only=True)
class BIM(GradientAttack):
    """Small steps from the image: the basic iterative method; with a momentum of 1, MI-FGSM."""

    name: ClassVar[str] = "bim"
    about: ClassVar[str] = "small steps from the image"
    reach: ClassVar[float] = 2.0
    steps: int = 10
    restarts: int = field(default=1, init=False)
    random_start: bool = field(default=False, init=False)


@register
@dataclass(frozen=True, kw_only=True)
class PGD(GradientAttack):
    """Small steps from random starts within epsilon: projected gradient descent."""

    name: ClassVar[str] = "pgd"
    about: ClassVar[str] = "small steps from random starts within epsilon"
    reach: ClassVar[float] = 2.5
    steps: int = 40
    random_start: bool = True


def __getattr__(name: str) -> Callable[..., Tensor]:
    """The function of an attack in the registry."""
    # The import system looks up names with underscores; the registry would then import modules too early.
    if name.startswith("_"):
        raise AttributeError(f"dcnet.robustness.attacks has no {name!r}")
    if name not in registry:
        raise AttributeError(f"dcnet.robustness.attacks has no {name!r}: its attacks are {', '.join(registry)}")

    def run(model: nn.Module, x: Tensor, y: Tensor, *, epsilon: float, **options: Any) -> Tensor:
        return perturb(model, x, y, name, epsilon=epsilon, **options)

    signature = _signature(registry[name])
    run.__name__ = run.__qualname__ = name
    run.__doc__ = _docstring(registry[name], signature)
    run.__signature__ = signature  # type: ignore[attr-defined]
    return run


def __dir__() -> list[str]:
    return sorted([*globals(), *registry])


def _signature(kind: type[Attack]) -> Signature:
    """The parameters of `perturb`, with the settings of the attack by name in place of `attack` and `settings`."""
    common = dict(inspect.signature(perturb).parameters)
    del common["attack"], common["settings"]
    if not kind.takes_targets:
        del common["targets"]
    shared = list(common.values())
    required = [parameter for parameter in shared if parameter.default is Parameter.empty]
    optional = [parameter for parameter in shared if parameter not in required]
    declared = inspect.signature(kind).parameters.values()
    settings = [setting.replace(kind=Parameter.KEYWORD_ONLY) for setting in declared]
    return Signature([*required, *settings, *optional], return_annotation=Tensor)


def _docstring(kind: type[Attack], signature: Signature) -> str:
    """What the attack does, and a line for each parameter of its function."""
    about = inspect.cleandoc(kind.__doc__ or kind.about).partition("Attributes:")[0].strip()
    lines = _section_entries(perturb, "Args")
    for base in reversed(kind.__mro__):
        lines |= _section_entries(base, "Attributes")
    lines["epsilon"] = "the largest perturbation, in `norm`."
    listed = [f"    {name}: {lines[name]}" for name in signature.parameters if name in lines]
    returned = "    The adversarial images: in [0, 1] and within epsilon of x."
    return "\n".join([about, "", "Args:", *listed, "", "Returns:", returned])


def _section_entries(documented: Any, section: str) -> dict[str, str]:
    """The descriptions in a section of a docstring, by name, with their indentation."""
    text = inspect.getdoc(documented) or ""
    found = re.search(rf"^{section}:\n((?:    .*\n?|\n)*)", text, re.MULTILINE)
    entries = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", found[1] if found else "", re.MULTILINE)
    return dict(entries)
