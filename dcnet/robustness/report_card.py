"""The report card of a network under attack, measurement by measurement, and the attacks of the paper's tables."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from dcnet.modes import frozen_eval
from dcnet.registry import Registry
from dcnet.robustness import corruptions
from dcnet.robustness.attacks import curve, perturb
from dcnet.robustness.autoattack import NEEDS_PACKAGE, has_package
from dcnet.robustness.certificates.certificate import certify
from dcnet.robustness.masked_gradients import gradients, smoothed, surface
from dcnet.robustness.subject import Subject
from dcnet.robustness.task import BATCH, Attack, accuracy, as_attack, classes_of

# A measurement as plain values for a record; {"skipped": reason} if it is impossible.
Measured = dict[str, Any]
Results = dict[str, Measured]

measurements: Registry[Callable[[Subject], Measured]] = Registry("a measurement")
measurement = measurements.register
# Number of epsilons of the curve per doubling.
STEPS_PER_DOUBLING = 2


@measurement
def clean(subject: Subject) -> Measured:
    """The accuracy without an attack."""
    with frozen_eval(subject.model):
        classes = classes_of(subject.model, subject.images)
    return {"accuracy": subject.accuracy(), "images": len(subject.images), "classes": classes}


measurement(gradients)
measurement(surface)


@measurement
def fgsm(subject: Subject) -> Measured:
    return _attack(subject, "fgsm")


@measurement
def bim(subject: Subject) -> Measured:
    return _attack(subject, "bim", steps=subject.effort.bim_steps)


@measurement
def pgd(subject: Subject) -> Measured:
    return _attack(subject, "pgd", steps=subject.effort.steps, restarts=subject.effort.restarts)


@measurement
def smoothed_pgd(subject: Subject) -> Measured:
    """PGD with a smoothed gradient, which does not saturate."""
    with smoothed(subject.model) as layers:
        if not layers:
            return {"skipped": "no magnitude of the network saturates"}
        return pgd(subject) | {"layers": layers}


@measurement
def transfer(subject: Subject) -> Measured:
    """The accuracy on images from attacks on another network."""
    if subject.source is None:
        return {"skipped": "needs another network for the same classes, such as a plain one"}
    effort = subject.effort
    steps = {"fgsm": {}, "bim": {"steps": effort.bim_steps}, "pgd": {"steps": effort.steps}}
    found = {name: subject.under(name, source=subject.source, **settings) for name, settings in steps.items()}
    own = accuracy(subject.source, subject.images, subject.labels, batch_size=subject.batch_size)
    return {"accuracies": found, "source_accuracy": own}


@measurement
def square(subject: Subject) -> Measured:
    """Square as the black-box attack."""
    if not has_package():
        return {"skipped": NEEDS_PACKAGE}
    return _attack(subject, "square", queries=subject.effort.queries)


@measurement
def by_epsilon(subject: Subject) -> Measured:
    """The accuracy under PGD at growing epsilons, up to the first at which it is 0, or to epsilon 1."""
    budgets, options = epsilons(subject.epsilon), {"steps": subject.effort.steps, **subject.options()}
    found = curve(subject.model, subject.images, subject.labels, "pgd", epsilons=budgets, **options)
    end = found.index(0) + 1 if 0 in found else len(found)
    return {"steps": subject.effort.steps, "epsilons": budgets[:end], "accuracies": found[:end]}


@measurement
def corrupted(subject: Subject) -> Measured:
    """The accuracy under corruptions at five severities."""
    return {"accuracies": corruptions.accuracies(subject.model, subject.images, subject.labels, **subject.options())}


@measurement
def certified(subject: Subject) -> Measured:
    """A bound for every attack within epsilon, from the weights alone."""
    try:
        images, labels, size = subject.images, subject.labels, subject.batch_size
        found = certify(subject.model, subject.epsilon, x=images, y=labels, batch_size=size)
    except ValueError as error:
        return {"skipped": str(error)}
    # JSON has no infinity; an infinite bound bounds nothing.
    finite = {
        name: value for name, value in found.summary().items() if not isinstance(value, float) or math.isfinite(value)
    }
    return finite | {"words": str(found)}


@measurement
def autoattack(subject: Subject) -> Measured:
    if not subject.effort.autoattack:
        return {"skipped": "is left out of a quick card"}
    if not has_package():
        return {"skipped": NEEDS_PACKAGE}
    return _attack(subject, "autoattack", queries=subject.effort.autoattack_queries)


def epsilons(around: float) -> list[float]:
    """0, then a geometric sequence from an eighth of the given epsilon to 1, the range of a pixel."""
    found = [0.0]
    for at in range(-3 * STEPS_PER_DOUBLING, 64 * STEPS_PER_DOUBLING):
        budget = around * 2 ** (at / STEPS_PER_DOUBLING)
        if budget >= 1:
            break
        found.append(budget)
    return [*found, 1.0]


def _attack(subject: Subject, name: str, **settings: Any) -> Measured:
    return {"accuracy": subject.under(name, **settings), "attack": str(as_attack(name, **settings)), **settings}


def report_card(
    subject: Subject,
    done: Mapping[str, Measured] | None = None,
    begins: Callable[[str], object] | None = None,
    ends: Callable[[str, Results], object] | None = None,
) -> Results:
    """Runs all measurements. Returns plain values for a record, by name, each with its time in seconds.

    Args:
        subject: the network under attack.
        done: earlier results, which are not measured again unless they were skipped.
        begins: called with the name of a measurement before it starts.
        ends: called with its name and all results so far.
    """
    results = {name: dict(found) for name, found in (done or {}).items() if "skipped" not in found}
    for name, measure in measurements.items():
        if name in results:
            continue
        if begins is not None:
            begins(name)
        before = time.perf_counter()
        results[name] = measure(subject)
        results[name]["seconds"] = time.perf_counter() - before
        if ends is not None:
            ends(name, dict(results))
    return {name: results[name] for name in measurements}


def evaluate_attacks(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    source: nn.Module | None = None,
    *,
    epsilon: float = 8 / 255,
    steps: int = 10,
    step: float | None = None,
    seed: int = 0,
    batch_size: int = BATCH,
) -> dict[str, Any]:
    """Accuracies in [0, 1] under FGSM and BIM, as in Tables 7 and 8 of the paper.

    "clean" is without an attack, "white_box" under attacks on the model, and "black_box" on images from attacks on the
    source; None without a source.

    Args:
        model: maps pixels in [0, 1] to logits; it is attacked in evaluation mode.
        images: uint8, or float in [0, 1].
        labels: int [N].
        source: another network for the same classes.
        epsilon: the largest change of a pixel.
        steps: the number of steps of BIM.
        step: the change of a pixel in a step of BIM; None for 2 epsilon / steps.
        seed: without effect, since these attacks use no random numbers.
        batch_size: images attacked at once.
    """
    attacks = (as_attack("fgsm"), as_attack("bim", steps=steps, step=step))
    options: dict[str, Any] = {"epsilon": epsilon, "seed": seed, "batch_size": batch_size}

    def under(attack: Attack, source: nn.Module | None = None) -> float:
        moved = perturb(model, images, labels, attack, source=source, **options)
        return accuracy(model, moved, labels, batch_size=batch_size)

    return {
        "epsilon": epsilon,
        "steps": steps,
        "step": 2 * epsilon / steps if step is None else step,
        "images": len(images),
        "clean": accuracy(model, images, labels, batch_size=batch_size),
        "white_box": {attack.name: under(attack) for attack in attacks},
        "black_box": None if source is None else {attack.name: under(attack, source) for attack in attacks},
    }
