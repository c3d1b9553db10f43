"""The records of runs that belong to no experiment, made into a Markdown table."""

from collections.abc import Sequence
from typing import Any

from dcnet.report.markdown import markdown
from dcnet.training.summary import grouped, spread

Record = dict[str, Any]


def digits(records: Sequence[Record]) -> str:
    """Accuracy of each operator on the digits."""
    rows = [
        [f"`{members[0]['config']['operator']}`", f"{members[0]['parameters']:,}", _results(members, "test_accuracy")]
        for members in grouped(records).values()
    ]
    config, seeds = records[0]["config"], len({record["config"]["seed"] for record in records})
    about = f"`{config['model']}`, last of {config['epochs']} epochs, mean ± deviation of {seeds} seeds, one recipe:"
    return f"{about}\n\n{markdown(['operator', 'parameters', 'test accuracy, %'], rows)}"


def _results(members: Sequence[Record], name: str) -> str:
    return spread([record["results"][name] for record in members])
