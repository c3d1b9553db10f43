"""Shows the functions of attacks in the API docs, with the parameters that `inspect.signature` gives.

They are made from the registry when they are asked for, so that reading the source does not find them.
"""

import inspect
import re
from typing import Any

import griffe

from dcnet.robustness import attacks


class AttackFunctions(griffe.Extension):
    """Adds a function for each attack, and gives the classes of attacks the settings that they take."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        if pkg.path != "dcnet":
            return
        module = pkg["robustness.attacks"]
        for name, kind in attacks.registry.items():
            module.set_member(name, _function(name, getattr(attacks, name), module))
            declared = pkg[f"{kind.__module__}.{kind.__qualname__}".removeprefix("dcnet.")]
            declared.set_member("__init__", _function("__init__", kind, declared))


def _function(name: str, made: Any, parent: griffe.Module | griffe.Class) -> griffe.Function:
    """What is shown of a callable: its parameters, and its docstring where it is not that of its class."""
    parameters = [_parameter(one) for one in inspect.signature(made).parameters.values()]
    function = griffe.Function(name, parameters=griffe.Parameters(*parameters), parent=parent)
    if inspect.isfunction(made):
        function.returns = "Tensor"
        function.docstring = griffe.Docstring(inspect.getdoc(made) or "", parent=function, parser="google")
    return function


def _parameter(parameter: inspect.Parameter) -> griffe.Parameter:
    annotation = _short(inspect.formatannotation(parameter.annotation))
    default = None if parameter.default is parameter.empty else repr(parameter.default)
    kind = griffe.ParameterKind[parameter.kind.name.lower()]
    return griffe.Parameter(parameter.name, annotation=annotation, kind=kind, default=default)


def _short(annotation: str) -> str:
    """The names of types without their modules."""
    return re.sub(r"(?:\w+\.)+(?=[A-Za-z_])", "", annotation)
