"""Attacks within a budget, on networks that take pixels from 0 to 1.

`attacks.fgsm(model, x, y, epsilon=8 / 255)` gives images, and so does every other attack of the registry by its name,
with what `perturb` takes; `attacks.curve(model, x, y, attack="pgd", epsilons=[...])` gives accuracies.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from dcnet.robustness import methods  # noqa: F401 (they fill the registry)
from dcnet.robustness.accuracy import accuracy, correct
from dcnet.robustness.attack import Attack, as_attack, register, registry
from dcnet.robustness.curves import curve
from dcnet.robustness.perturbing import perturb

__all__ = ["Attack", "accuracy", "as_attack", "correct", "curve", "perturb", "register", "registry"]


def __getattr__(name: str) -> Callable[..., Tensor]:
    """The function of an attack, so that one more attack is one more function."""
    if name not in registry:
        raise AttributeError(f"dcnet.robustness.attacks has no {name!r}: its attacks are {', '.join(registry)}")

    def run(model: nn.Module, x: Tensor, y: Tensor, *, epsilon: float, **options: Any) -> Tensor:
        return perturb(model, x, y, name, epsilon=epsilon, **options)

    run.__name__ = run.__qualname__ = name
    run.__doc__ = f"{registry[name].__doc__}\n\n    Its settings, and what `perturb` takes, are the options."
    return run


def __dir__() -> list[str]:
    return sorted([*globals(), *registry])
