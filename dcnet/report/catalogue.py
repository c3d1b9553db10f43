"""What there is to choose from: operators, networks, datasets and recipes, as the registries have them."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

import dcnet
from dcnet.data import datasets
from dcnet.data.registry import data_folder
from dcnet.losses.margin import aliases_of
from dcnet.models import create_model, networks
from dcnet.models.registry import prefixes
from dcnet.operator import PLAIN
from dcnet.part import Held, Part
from dcnet.report.listing import Listing, Row, first_line, yes_or_no
from dcnet.training import RECIPES, RunConfig

CLASSES, OPERATOR = 100, "tanh-cos"


def _of(name: str) -> Callable[[Row], str]:
    return lambda row: row[name]


def operators() -> dict[str, Listing]:
    """Magnitudes, angles and weightings, of which one each makes an operator."""
    columns = {
        "name": _of("name"),
        "equation": _of("equation"),
        "bounded": lambda row: yes_or_no(row["bounded"]),
        "smooth": lambda row: yes_or_no(row["smooth"]),
        "constants": _of("described"),
    }
    magnitudes = [_part(made(), "h(n)") for made in dcnet.magnitude.registry.values()]
    angles = [_part(made(), "g(theta)") for made in dcnet.angle.registry.values()]
    long = ("equation", "constants")
    by_norm, by_angle = "magnitudes: by the norm n of the patch", "angles: by the angle of filter and patch"
    return {
        "magnitudes": Listing(by_norm, columns, magnitudes, long=long),
        "angles": Listing(by_angle, columns, angles, long=long),
        "weightings": _weightings(),
    }


def _part(part: Part, symbol: str) -> Row:
    held, claims = Held(part, ""), {name: getattr(part, name) for name in ("bounded", "smooth")}
    return {
        "name": part.name,
        "about": first_line(type(part)),
        "equation": f"{symbol} = {held.equation(n='n')}",
        **claims,
        "constants": {name: dataclasses.asdict(slot) for name, slot in part.slots().items()},
        "described": ", ".join([*held.describe(), *_without_symbol(part)]),
    }


def _without_symbol(part: Part) -> list[str]:
    """The constants that an equation does not name, such as the slopes of a spline."""
    slots = {name: slot for name, slot in part.slots().items() if name not in part.symbols()}
    return [f"{slot.size} {name} = {slot}" for name, slot in slots.items()]


def _weightings() -> Listing:
    columns = {
        "name": _of("name"),
        "equation": _of("equation"),
        "stays bounded": lambda row: yes_or_no(row["keeps_bound"]),
    }
    symbols = {"x": "h(||x||)", "w": "h(||w||)", "both": "h(||w|| ||x||)", "scale": "alpha"}
    rows = [
        {"name": name, "equation": made.equation.format(**symbols), "keeps_bound": made.keeps_bound}
        for name, made in dcnet.weighting.registry.items()
    ]
    caption = 'A spec reads magnitude-angle or magnitude-angle+weighting: tanh-cos, "seg(slope=0.2)-sqcos+linear".'
    return Listing("weightings: how the norm of the filter enters", columns, rows, caption=caption)


def models() -> Listing:
    """The networks, with their parameters at width 1."""
    columns = {
        "name": _of("name"),
        "about": _of("about"),
        PLAIN: lambda row: f"{row['parameters'][PLAIN]:,}",
        OPERATOR: lambda row: f"{row['parameters'][OPERATOR]:,}",
    }
    rows = [
        {
            "name": name,
            "about": first_line(entry.build),
            "parameters": {operator: _count(name, operator) for operator in (PLAIN, OPERATOR)},
        }
        for name, entry in networks.items()
    ]
    others = " and ".join(f"{prefix}:<name>" for prefix in prefixes)
    caption = f"{PLAIN} and {OPERATOR}: parameters at width 1 with {CLASSES} classes. Beside these there is {others}."
    return Listing("networks", columns, rows, (PLAIN, OPERATOR), ("about",), caption)


def _count(name: str, operator: str) -> int:
    # Without memory, and without the time to fill it.
    with torch.device("meta"):
        model = create_model(name, operator, CLASSES)
    return sum(parameter.numel() for parameter in model.parameters())


def data() -> Listing:
    """The datasets, and where they are looked for."""
    columns = {"name": _of("name"), "about": _of("about")}
    rows = [{"name": name, "about": entry.about} for name, entry in datasets.items()]
    caption = f"They are in {data_folder()}, or elsewhere by --data-dir or DCNET_DATA."
    return Listing("datasets", columns, rows, long=("about",), caption=caption)


def recipes() -> Listing:
    """The recipes, with what they mostly differ in; as JSON with all values."""
    rows = [
        {"name": name, "about": first_line(made), "config": made().described(), "described": _main_values(made())}
        for name, made in RECIPES.items()
    ]
    columns = {"name": _of("name"), "about": _of("about"), "main values": _of("described")}
    caption = "Every value can be replaced: see `dcnet train --help`."
    return Listing("recipes", columns, rows, long=("about", "main values"), caption=caption)


def margins() -> Listing:
    """The margins of losses, with the logits they give."""
    rows = [
        {
            "name": name,
            "aliases": aliases_of(name),
            "about": kind.about,
            "scale": kind.scale,
            "settings": dataclasses.asdict(kind()),
        }
        for name, kind in dcnet.losses.registry.items()
    ]
    columns = {
        "name": _of("name"),
        "also called": lambda row: ", ".join(row["aliases"]),
        "logits of the label, of others": _of("about"),
    }
    caption = (
        'In Python: dcnet.losses.MarginSoftmax(512, 100, margin="a-softmax"). Names may be written as CosFace or '
        "am_softmax; records have the name of the first column."
    )
    return Listing("margins", columns, rows, long=("also called", "logits of the label, of others"), caption=caption)


def _main_values(config: RunConfig) -> str:
    length = f"{config.steps:,} steps" if config.steps else f"{config.epochs} epochs"
    schedule: Mapping[str, Any] = config.described()["schedule"]
    return (
        f"{config.model} on {config.dataset}, {length}, batches of {config.batch_size}, "
        f"{config.optimizer} with lr {config.lr:g}, {schedule['name']} schedule, {config.precision}"
    )
