"""Attacks within a budget, on networks that take pixels from 0 to 1.

`attacks.fgsm(model, x, y, epsilon=8 / 255)` gives images, and so does every other attack of the registry by its name,
with what `perturb` takes; `attacks.curve(model, x, y, attack="pgd", epsilons=[...])` gives accuracies.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable
from inspect import Parameter, Signature
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
    settings = [_parameter(declared) for declared in dataclasses.fields(kind) if declared.init]
    required = [one for one in shared if one.default is Parameter.empty]
    own = sorted(settings, key=lambda one: one.default is not Parameter.empty)
    return Signature([*required, *own, *(one for one in shared if one not in required)], return_annotation=Tensor)


def _parameter(declared: dataclasses.Field[Any]) -> Parameter:
    missing = dataclasses.MISSING
    default = declared.default if declared.default_factory is missing else declared.default_factory()
    default = Parameter.empty if default is missing else default
    return Parameter(declared.name, Parameter.KEYWORD_ONLY, default=default, annotation=declared.type)


def _docstring(kind: type[Attack], signature: Signature) -> str:
    """What the attack does, and a line for each parameter of its function."""
    about = inspect.cleandoc(kind.__doc__ or kind.about).partition("Attributes:")[0].strip()
    lines: dict[str, str] = _described(perturb, "Args")
    for base in reversed(kind.__mro__):
        lines |= _described(base, "Attributes") if "__doc__" in vars(base) else {}
    lines["epsilon"] = "the largest perturbation, in `norm`."
    listed = [f"    {name}: {lines[name]}" for name in signature.parameters if name in lines]
    returned = "    The images that it makes of x, from 0 to 1 and no farther from it than epsilon."
    return "\n".join([about, "", "Args:", *listed, "", "Returns:", returned])


def _described(documented: Any, section: str) -> dict[str, str]:
    """The descriptions in a section of a docstring, by name, as indented as they are there."""
    text = inspect.getdoc(documented) or ""
    found = re.search(rf"^{section}:\n((?:    .*\n?|\n)*)", text, re.MULTILINE)
    entries = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", found[1] if found else "", re.MULTILINE)
    return dict(entries)
