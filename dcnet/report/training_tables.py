"""The records of runs made into Markdown tables."""

from collections.abc import Sequence
from typing import Any

from dcnet.experiments import chosen
from dcnet.report.markdown import markdown
from dcnet.training.summary import grouped, spread

Record = dict[str, Any]


def paper() -> dict[tuple[str, str, str], float]:
    """The paper's test errors in % of Tables 3 and 4, by network, operator and activation."""
    cells = [cell for experiment in chosen(["table3", "table4"]) for cell in experiment.cells]
    found = [(cell.config, cell.paper) for cell in cells if cell.config is not None]
    return {(of.model, of.operator, of.activation or "relu"): error for of, error in found if isinstance(error, float)}


def digits(records: Sequence[Record]) -> str:
    """Accuracy of each operator on the digits."""
    rows = [
        [f"`{members[0]['config']['operator']}`", f"{members[0]['parameters']:,}", _results(members, "test_accuracy")]
        for members in grouped(records).values()
    ]
    config, seeds = records[0]["config"], len({record["config"]["seed"] for record in records})
    about = f"`{config['model']}`, last of {config['epochs']} epochs, mean ± deviation of {seeds} seeds, one recipe:"
    return f"{about}\n\n{markdown(['operator', 'parameters', 'test accuracy, %'], rows)}"


def cifar100(records: Sequence[Record]) -> str:
    """Test errors on CIFAR-100 beside those of the paper."""
    known = paper()
    rows = [_beside_the_paper(members, known) for members in grouped(records).values()]
    rows.sort(key=lambda row: (row[0], row[2] != "relu"))
    about = (
        "CIFAR-100, test error in %, at the last of 42,500 steps of the paper's recipe (`--recipe paper-cifar`), one "
        "seed unless a deviation is given:"
    )
    headings = ["network", "operator", "activation", "seeds", "test error, %", "paper", "difference"]
    return f"{about}\n\n{markdown(headings, rows)}"


def _beside_the_paper(members: Sequence[Record], known: dict[tuple[str, str, str], float]) -> list[str]:
    config = members[0]["config"]
    activation = config["activation"] or "relu"
    theirs = known[config["model"], config["operator"], activation]
    errors = [record["results"]["test_error"] for record in members]
    difference = sum(errors) / len(errors) - theirs
    names = [f"`{config['model']}`", f"`{config['operator']}`", activation, str(len(members))]
    return [*names, spread(errors), f"{theirs:.2f}", f"{difference:+.2f}"]


def _results(members: Sequence[Record], name: str) -> str:
    return spread([record["results"][name] for record in members])
