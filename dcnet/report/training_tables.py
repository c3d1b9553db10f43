"""The records of runs made into Markdown tables."""

from collections.abc import Sequence
from typing import Any

from dcnet.report.markdown import markdown
from dcnet.training.summary import grouped, spread

Record = dict[str, Any]

# Test errors in % of the paper's Tables 3 and 4, by network, operator and activation.
PAPER = {
    ("cnn9", "conv", "relu"): 26.01,
    ("cnn9", "conv", "none"): 58.24,
    ("cnn9", "seg-sqcos", "none"): 24.29,
    ("resnet32", "conv", "relu"): 26.69,
    ("resnet32", "tanh-cos", "relu"): 21.17,
    ("resnet32", "seg-cos", "relu"): 20.91,
}


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
    rows = [_beside_the_paper(members) for members in grouped(records).values()]
    rows.sort(key=lambda row: ([name for name, *_ in PAPER].index(row[0].strip("`")), row[2] != "relu"))
    about = (
        "CIFAR-100, test error in %, at the last of 42,500 steps of the paper's recipe (`--recipe paper-cifar`), one "
        "seed unless a deviation is given:"
    )
    headings = ["network", "operator", "activation", "seeds", "test error, %", "paper", "difference"]
    return f"{about}\n\n{markdown(headings, rows)}"


def _beside_the_paper(members: Sequence[Record]) -> list[str]:
    config = members[0]["config"]
    activation = config["activation"] or "relu"
    paper = PAPER[config["model"], config["operator"], activation]
    errors = [record["results"]["test_error"] for record in members]
    difference = sum(errors) / len(errors) - paper
    names = [f"`{config['model']}`", f"`{config['operator']}`", activation, str(len(members))]
    return [*names, spread(errors), f"{paper:.2f}", f"{difference:+.2f}"]


def _results(members: Sequence[Record], name: str) -> str:
    return spread([record["results"][name] for record in members])
