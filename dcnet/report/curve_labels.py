"""What tells runs apart: the values of their configs that differ, and a title of those that do not."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dcnet.operator import is_plain
from dcnet.training.config import completed

Record = dict[str, Any]
Groups = Sequence[Sequence[Record]]
# From the name of a value and the value to words.
Spelled = Callable[[str, Any], str]

# Said by their value alone, in this order; all others are name=value.
KNOWN = ("dataset", "model", "operator")
# A plain network has none of these, whatever the recipe says.
DECOUPLED_ONLY = ("projection_every", "weighted_gradients", "orthonormal")
# Of all values that are words the one that may be a path; others, as of an adversary, have slashes in fractions.
PATH = "pretrained"


def labels(groups: Groups) -> list[str]:
    """A label for each group of runs: what it has and others have not, and how many runs it is the mean of."""
    configs = [completed(members[0]["config"]) for members in groups]
    short = _labels(configs, _short)
    # Two schedules of one name, or two checkpoints of one, are told apart by all that they are.
    found = short if len(set(short)) == len(short) else _labels(configs, _whole)
    return [label + mean_of(members) for label, members in zip(found, groups, strict=True)]


def common_words(groups: Groups) -> str:
    """Dataset, network and operator, as far as all have the same."""
    configs = [completed(members[0]["config"]) for members in groups]
    return ", ".join(configs[0][name] for name in KNOWN if not _differs(configs, name))


def _differing(configs: Sequence[Record]) -> list[str]:
    every = dict.fromkeys(name for config in configs for name in config)
    names = [*KNOWN, *(name for name in every if name not in (*KNOWN, "seed", "recipe"))]
    # The name of a recipe says nothing that its values do not say, unless they are the same.
    return [name for name in names if _differs(configs, name)] or ["recipe"] * _differs(configs, "recipe")


def _differs(configs: Sequence[Record], name: str) -> bool:
    if name in DECOUPLED_ONLY:
        configs = [config for config in configs if not is_plain(config["operator"])]
    return any(config.get(name) != configs[0].get(name) for config in configs)


def _only_differing_parts(config: Record, configs: Sequence[Record], names: Sequence[str]) -> Record:
    """The config with those parts of its mappings alone that are not the same in all; what has a name goes by it."""
    told = dict(config)
    for name in names:
        values = [value for other in configs if isinstance(value := other.get(name), dict) and "name" not in value]
        if len(values) == len(configs):
            told[name] = {key: part for key, part in config[name].items() if any(v.get(key) != part for v in values)}
    return told


def _labels(configs: Sequence[Record], spelled: Spelled) -> list[str]:
    names = _differing(configs) or ["operator"]
    told = [_only_differing_parts(config, configs, names) for config in configs]
    # What is spelled alike everywhere, as two schedules of one name, tells nothing apart.
    telling = [name for name in names if len({spelled(name, config.get(name)) for config in told}) > 1] or names
    return [_label(config, telling, spelled) for config in told]


def _label(config: Record, names: Sequence[str], spelled: Spelled) -> str:
    # What a run has not need not be said, unless it is all that there is to say.
    names = [name for name in names if config.get(name) is not None] or names
    return ", ".join(
        str(config[name]) if name in KNOWN else f"{name}={spelled(name, config.get(name))}" for name in names
    )


def _short(name: str, value: Any) -> str:
    """A schedule by its name, numbers without a tail, and of a path the end."""
    if isinstance(value, dict) and "name" in value:
        return str(value["name"])
    if isinstance(value, str) and name == PATH:
        return Path(value).name
    return f"{value:g}" if isinstance(value, float) else _whole(name, value)


def _whole(name: str, value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    parts = ",".join(f"{key}={part}" for key, part in value.items() if key != "name")
    return f"{value['name']}({parts})" if "name" in value else parts


def mean_of(members: Sequence[Record]) -> str:
    """Words to add: how many runs there are at least and at most at one point, where it is not one."""
    lengths = [len(record["curves"].get("step", [])) for record in members]
    if len(members) == 1:
        return ""
    least = sum(length == max(lengths) for length in lengths)
    return f", mean of {len(members)}" if least == len(members) else f", mean of {least} to {len(members)}"
