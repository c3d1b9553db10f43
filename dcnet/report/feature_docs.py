"""The records of features made into the table and the pictures of the docs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from dcnet.operator import PLAIN, is_plain
from dcnet.report.feature_plots import feature_plots
from dcnet.report.features import features_in
from dcnet.report.markdown import markdown
from dcnet.report.spread import target_angle

Record = dict[str, Any]
# The losses are compared on a plain network, and the networks by this loss.
LOSS = "softmax"
ORDER = (LOSS, "m-softmax", "a-softmax"), (PLAIN, "sphere-cos", "ball-cos", "tanh-cos")
HEADINGS = ["network", "loss", "test accuracy, %", "to own weights, °"]
HEADINGS += ["within, °", "between, °", "nearest, °", "angular Fisher score"]


def features(records: Sequence[Record]) -> str:
    """A row for each network: how well it does, and how its features lie."""
    first = records[0]["config"]
    about = (
        f"`--recipe {first['recipe']}`: {first['dataset'].upper()}, `{first['model']}` of width {first['width']:g}, "
        f"{first['features']} features, {first['steps']:,} steps of {first['batch_size']}, seed {first['seed']}; all "
        f"{records[0]['test_images']:,} test images, at the last step:"
    )
    return f"{about}\n\n{markdown(HEADINGS, [_row(record) for record in _sorted(records)])}"


def pictures(results: Path) -> dict[str, Figure]:
    """By the names of their files; none where there are no records."""
    records = _sorted(
        [json.loads(path.read_text(encoding="utf-8")) for path in sorted((results / "features").glob("*.json"))]
    )
    natural = [record for record in records if record["config"].get("adversary") is None]
    chosen = {
        "features_losses.png": [record for record in natural if is_plain(record["config"]["operator"])],
        "features_operators.png": [record for record in natural if record["config"]["margin"] == LOSS],
        "features_adversarial.png": [record for record in records if record not in natural],
    }
    return {name: feature_plots([features_in(record) for record in some]) for name, some in chosen.items() if some}


def _row(record: Record) -> list[str]:
    config, spread = record["config"], record["spread"]
    annealed = f", annealing {config['annealing']}" if config["annealing"] else ""
    angles = [f"{spread[name]:.1f}" for name in ("within", "between", "nearest")]
    hostile = f", against `{config['adversary']}`" if config.get("adversary") else ""
    names = [f"`{config['operator']}`", f"`{config['margin']}`{annealed}{hostile}"]
    return [*names, f"{record['accuracy']:.2f}", _target(record), *angles, f"{spread['fisher']:.4f}"]


def _target(record: Record) -> str:
    found = features_in(record)
    if found.directions is None:
        return "-"
    return f"{target_angle(found.points, found.labels, found.directions):.1f}"


def _sorted(records: Sequence[Record]) -> list[Record]:
    """Plain networks first, by their losses, then the others, and those with an adversary last."""
    losses, operators = ORDER

    def place(record: Record) -> tuple[bool, int, int, str]:
        config = record["config"]
        return (
            config.get("adversary") is not None,
            _index(operators, config["operator"]),
            _index(losses, config["margin"].partition("(")[0]),
            config["annealing"] or "",
        )

    return sorted(records, key=place)


def _index(known: Sequence[str], name: str) -> int:
    return known.index(name) if name in known else len(known)
