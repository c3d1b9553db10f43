"""What a report card is made of: measurements by name, in the order in which they are made, the longest last."""

import importlib.util
import math
from collections.abc import Callable
from typing import Any

from dcnet.robustness import corruptions
from dcnet.robustness.accuracy import accuracy
from dcnet.robustness.attack import as_attack
from dcnet.robustness.certifying import certify
from dcnet.robustness.curves import curve
from dcnet.robustness.probes import gradients, surface
from dcnet.robustness.smoothed import smoothed
from dcnet.robustness.subject import Subject
from dcnet.robustness.task import classes_of
from dcnet.robustness.undisturbed import undisturbed

Measured = dict[str, Any]
# What is measured, as plain values for a record; {"skipped": why} where it cannot be.
Measure = Callable[[Subject], Measured]

measurements: dict[str, Measure] = {}
# Attacks that are transferred, and the steps between two epsilons of the curve that double it.
TRANSFERRED = ("fgsm", "bim", "pgd")
STEPS_PER_DOUBLING = 2
PACKAGE = "pyautoattack"
WITHOUT_PACKAGE = f"needs the package {PACKAGE}: install dcnet with its extra, dcnet[robustness]"


def measurement(measure: Measure) -> Measure:
    """Enters a measurement under its own name."""
    measurements[measure.__name__] = measure
    return measure


@measurement
def clean(subject: Subject) -> Measured:
    """Without any attack."""
    with undisturbed(subject.model):
        classes = classes_of(subject.model, subject.images)
    return {"accuracy": subject.accuracy(), "images": len(subject.images), "classes": classes}


measurement(gradients)
measurement(surface)


@measurement
def fgsm(subject: Subject) -> Measured:
    """One step."""
    return _attacked(subject, "fgsm")


@measurement
def bim(subject: Subject) -> Measured:
    """Some steps from the image itself."""
    return _attacked(subject, "bim", steps=subject.effort.bim_steps)


@measurement
def pgd(subject: Subject) -> Measured:
    """Many steps from many places."""
    return _attacked(subject, "pgd", steps=subject.effort.steps, restarts=subject.effort.restarts)


@measurement
def smoothed_pgd(subject: Subject) -> Measured:
    """PGD by another gradient than that of the network, which does not saturate."""
    with smoothed(subject.model) as layers:
        if not layers:
            return {"skipped": "the network has no magnitude that could saturate"}
        found = _attacked(subject, "pgd", steps=subject.effort.steps, restarts=subject.effort.restarts)
    return found | {"layers": layers}


@measurement
def transfer(subject: Subject) -> Measured:
    """Attacks on another network, whose images are then shown to this one."""
    if subject.source is None:
        return {"skipped": "needs another network for the same classes, as a plain twin"}
    steps = {"fgsm": {}, "bim": {"steps": subject.effort.bim_steps}, "pgd": {"steps": subject.effort.steps}}
    found = {name: subject.under(name, source=subject.source, **steps[name]) for name in TRANSFERRED}
    own = accuracy(subject.source, subject.images, subject.labels, batch_size=subject.batch_size)
    return {"accuracies": found, "source_accuracy": own}


@measurement
def square(subject: Subject) -> Measured:
    """Questions to the network alone."""
    if not _has_package():
        return {"skipped": WITHOUT_PACKAGE}
    return _attacked(subject, "square", queries=subject.effort.queries)


@measurement
def by_epsilon(subject: Subject) -> Measured:
    """The accuracy that PGD leaves at growing epsilons, up to the first that leaves nothing, or to 1."""
    budgets, options = epsilons(subject.epsilon), {"steps": subject.effort.steps, **subject.options()}
    found = curve(subject.model, subject.images, subject.labels, "pgd", epsilons=budgets, **options)
    end = found.index(0) + 1 if 0 in found else len(found)
    return {"steps": subject.effort.steps, "epsilons": budgets[:end], "accuracies": found[:end]}


@measurement
def corrupted(subject: Subject) -> Measured:
    """What happens without an attacker, at five severities."""
    return {"accuracies": corruptions.accuracies(subject.model, subject.images, subject.labels, **subject.options())}


@measurement
def certified(subject: Subject) -> Measured:
    """What no attack within epsilon can do, by the weights alone."""
    try:
        images, labels, size = subject.images, subject.labels, subject.batch_size
        found = certify(subject.model, subject.epsilon, x=images, y=labels, batch_size=size)
    except ValueError as error:
        return {"skipped": str(error)}
    numbers = {name: value for name, value in found.summary().items() if _finite(value)}
    return {**numbers, "words": str(found)}


def _finite(value: Any) -> bool:
    """JSON has no word for infinity, and a bound that is beyond all numbers bounds nothing."""
    return not isinstance(value, float) or math.isfinite(value)


@measurement
def autoattack(subject: Subject) -> Measured:
    """Four attacks, one after the other."""
    if not subject.effort.autoattack:
        return {"skipped": "is left out of a quick card"}
    if not _has_package():
        return {"skipped": WITHOUT_PACKAGE}
    return _attacked(subject, "autoattack", queries=subject.effort.autoattack_queries)


def epsilons(around: float) -> list[float]:
    """0, an eighth of it, and on in equal ratios up to 1, which is as far as any pixel can be moved."""
    found = [0.0]
    for at in range(-3 * STEPS_PER_DOUBLING, 64 * STEPS_PER_DOUBLING):
        budget = around * 2 ** (at / STEPS_PER_DOUBLING)
        if budget >= 1:
            break
        found.append(budget)
    return [*found, 1.0]


def _attacked(subject: Subject, name: str, **settings: Any) -> Measured:
    return {
        "accuracy": subject.under(name, **settings),
        "attack": str(as_attack(name, **settings)),
        **settings,
    }


def _has_package() -> bool:
    try:
        return importlib.util.find_spec(PACKAGE) is not None
    except ValueError:
        # What is entered as None into the modules cannot be imported either.
        return False
