"""Adds the attack functions to the API docs, with their parameters from `inspect.signature`.

`dcnet.robustness.attacks` creates these functions from its registry on access, so they are not in the source.
"""

import inspect
import re
from typing import Any

import griffe

from dcnet.robustness import attacks


class AttackFunctions(griffe.Extension):
    """Adds a function for each attack, and the parameters of each attack class."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        if pkg.path != "dcnet":
            return
        module = pkg["robustness.attacks"]
        for name, kind in attacks.registry.items():
            module.set_member(name, _function(name, getattr(attacks, name), module))
            declared = pkg[f"{kind.__module__}.{kind.__qualname__}".removeprefix("dcnet.")]
            declared.set_member("__init__", _function("__init__", kind, declared))


def _function(name: str, source: Any, parent: griffe.Module | griffe.Class) -> griffe.Function:
    """The docs of a callable: its parameters, and, for a function, its docstring."""
    parameters = [_parameter(one) for one in inspect.signature(source).parameters.values()]
    function = griffe.Function(name, parameters=griffe.Parameters(*parameters), parent=parent)
    if inspect.isfunction(source):
        function.returns = "Tensor"
        function.docstring = griffe.Docstring(inspect.getdoc(source) or "", parent=function, parser="google")
    return function


def _parameter(parameter: inspect.Parameter) -> griffe.Parameter:
    annotation = _without_modules(inspect.formatannotation(parameter.annotation))
    default = None if parameter.default is parameter.empty else repr(parameter.default)
    kind = griffe.ParameterKind[parameter.kind.name.lower()]
    return griffe.Parameter(parameter.name, annotation=annotation, kind=kind, default=default)


def _without_modules(annotation: str) -> str:
    return re.sub(r"(?:\w+\.)+(?=[A-Za-z_])", "", annotation)
