"""Attacks by name: what each of them has to say and to do, and where they are found."""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from dcnet.robustness.norms import as_norm
from dcnet.robustness.task import Task
from dcnet.spec import unknown


@dataclass(frozen=True, kw_only=True)
class Attack:
    """A way to look for images near others that a network is wrong about.

    `about` is a line about it; `white_box` says that it takes gradients of the network, and not only its answers;
    `takes_targets` that it can be told what the images are to be taken for.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    white_box: ClassVar[bool] = True
    takes_targets: ClassVar[bool] = True
    norm: str = "linf"

    def __post_init__(self) -> None:
        as_norm(self.norm)

    def __str__(self) -> str:
        """The name, with those settings that are not as by default."""
        changed = [f"{key}={value}" for key, value in self.settings().items() if value != _default(self, key)]
        return f"{self.name}({','.join(changed)})" if changed else self.name

    def settings(self) -> dict[str, Any]:
        """All that may be chosen about it, as a record holds it."""
        return {declared.name: getattr(self, declared.name) for declared in _chosen(type(self))}

    @property
    def searching(self) -> bool:
        """Whether it ends with an image as soon as the network is wrong about it."""
        return True

    def at_full_strength(self) -> "Attack":
        """The same, but for going on with images that the network is wrong about, as long as there is a way to."""
        return self

    def images(self, task: Task) -> Tensor:
        """The images it finds, on the device of the task's and within the budget."""
        raise NotImplementedError


registry: dict[str, type[Attack]] = {}
Kind = TypeVar("Kind", bound=type[Attack])


def register(kind: Kind) -> Kind:
    """Enters an attack into the registry under its name, which is also that of a function of `attacks`."""
    if not kind.name.isidentifier():
        raise ValueError(f"{kind.name!r} cannot be the name of a function: use letters, digits and underscores")
    if kind.name in registry:
        raise ValueError(f"{kind.name!r} is taken: {registry[kind.name].__name__} is an attack of that name")
    registry[kind.name] = kind
    return kind


def as_attack(given: Attack | str, **settings: Any) -> Attack:
    """The attack of a name, or the attack itself, with these settings changed."""
    if not isinstance(given, Attack) and given not in registry:
        raise unknown("attack", str(given), registry)
    kind = type(given) if isinstance(given, Attack) else registry[given]
    known = [declared.name for declared in _chosen(kind)]
    if strange := [key for key in settings if key not in known]:
        raise ValueError(f"{kind.name} has no {strange[0]!r} to choose: it has {', '.join(known)}")
    return dataclasses.replace(given, **settings) if isinstance(given, Attack) else kind(**settings)


def check_count(what: str, value: Any) -> None:
    """Refuses what is not a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{what} must be a whole number of at least 1, not {value!r}")


def _chosen(kind: type[Attack]) -> list[dataclasses.Field[Any]]:
    return [declared for declared in dataclasses.fields(kind) if declared.init]


def _default(attack: Attack, key: str) -> Any:
    return next(declared.default for declared in dataclasses.fields(attack) if declared.name == key)
