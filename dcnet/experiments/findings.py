"""All that can be told of a table, by the names that machines know it by."""

from collections.abc import Sequence

from dcnet.experiments.experiment import Experiment
from dcnet.experiments.finding import Finding
from dcnet.experiments.nearness import nearness_of
from dcnet.experiments.order import order_of
from dcnet.experiments.status import CellStatus
from dcnet.experiments.winner import winner_of

LOOKED_FOR = {"near": nearness_of, "order": order_of, "winner": winner_of}


def findings_of(experiment: Experiment, found: Sequence[CellStatus]) -> dict[str, Finding | None]:
    """What the cells come to; None for what cannot be told of them."""
    return {name: look(experiment, found) for name, look in LOOKED_FOR.items()}


def told_of(experiment: Experiment, found: Sequence[CellStatus]) -> list[Finding]:
    """Of these what can be told."""
    return [finding for finding in findings_of(experiment, found).values() if finding is not None]
