"""The robustness section of the page: curves of evaluations, their descriptions and commands."""

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import pytest
from helpers.page_records import a_run, drawn, put, values_of
from helpers.page_tree import Node

from dcnet.cli.app import parse
from dcnet.report.page.provenance import UNKNOWN_COMMAND
from dcnet.report.page.robustness_sections import QUICK_NOTE
from dcnet.robustness.subject import QUICK, STANDARD, Effort

CURVE = {"epsilons": [0.0, 0.1, 1.0], "accuracies": [0.9, 0.25, 0.0]}


def card(effort: Effort = STANDARD, epsilon: float = 8 / 255, images: int = 1000, **more: Any) -> dict[str, Any]:
    """The drawn part of a card that `dcnet attack` stores in the record."""
    settings = {"epsilon": epsilon, "norm": "linf", "images": images, "seed": 0, **dataclasses.asdict(effort)}
    results = {"by_epsilon": CURVE | {"steps": effort.steps}, "corrupted": {"accuracies": {"noise": [0.8, 0.7]}}}
    return {"dataset": "digits", "settings": settings, "results": results | more}


def robustness(folder: Path, **evaluations: Any) -> Node:
    put(folder, "run", a_run(evaluations=evaluations))
    return drawn(folder).one("section", id="robustness")


def run_name() -> str:
    return f"{a_run()['name']}-{a_run()['hash']}"


def commands_in(part: Node) -> set[str]:
    return {node.text for node in part.all("code")}


def test_attack_card_chart_has_a_description_and_its_command(tmp_path: Path):
    part = robustness(tmp_path, **{"attack-8/255-1000-images": card()})
    headings = [node.text for node in part.all("h3")]
    assert headings == ["cnn9-small on digits: PGD by epsilon", "cnn9-small on digits: corrupted by noise"]
    first, second = part.all("figure")
    assert [(line["x"], line["y"]) for line in values_of(first)["lines"]] == [
        ([0.0, 0.1, 1.0], ["90.00", "25.00", "0.00"])
    ]
    assert [line["y"] for line in values_of(second)["lines"]] == [["80.00", "70.00"]]
    assert "On 1,000 perturbed test images, 50 steps per epsilon" in first.one("figcaption").text
    assert commands_in(part) == {f"dcnet attack {run_name()}"}
    assert a_run()["command"] not in part.text
    assert QUICK_NOTE not in part.text


def test_runs_with_other_differences_have_distinct_names(tmp_path: Path):
    for i, changes in enumerate(({"width": 0.5}, {"width": 1.0}, {"seed": 3})):
        config = a_run()["config"] | changes
        put(tmp_path, str(i), a_run(evaluations={"attack-8/255-1000-images": card()}, config=config, hash=str(i)))
    figure, *_ = drawn(tmp_path).one("section", id="robustness").all("figure")
    operator = a_run()["config"]["operator"]
    expected = {f"{operator}, seed 0, width=0.5", f"{operator}, seed 0, width=1", f"{operator}, seed 3"}
    assert {line["name"] for line in values_of(figure)["lines"]} == expected


def test_quick_card_has_a_note(tmp_path: Path):
    part = robustness(tmp_path, **{"attack-8/255-1000-images-quick": card(QUICK)})
    # Corruptions are the same on any card.
    assert [QUICK_NOTE in figure.one("figcaption").text for figure in part.all("figure")] == [True, False]
    assert commands_in(part) == {f"dcnet attack {run_name()} --quick"}


@pytest.mark.parametrize(
    ("found", "options"),
    [
        (card(images=200), "--images 200"),
        (card(epsilon=4 / 255), "--epsilon 4/255"),
        (card(epsilon=0.0321), "--epsilon 0.0321"),
        (card(transfer={"source": {"run": "a plain one", "weights": "0"}}), "--source 'a plain one'"),
        (card(QUICK, transfer={"skipped": "needs another"}), "--quick"),
    ],
)
def test_attack_command_has_the_options_that_differ_from_defaults(tmp_path: Path, found: dict[str, Any], options: str):
    (command,) = commands_in(robustness(tmp_path, card=found))
    assert command == f"dcnet attack {run_name()} {options}"
    words = shlex.split(command)[1:]
    asked = parse(words)
    assert (asked.run, asked.quick) == (run_name(), found["settings"]["steps"] == QUICK.steps)


def test_command_in_the_record_takes_precedence(tmp_path: Path):
    part = robustness(tmp_path, card=card() | {"command": "dcnet attack this --workers 7"})
    assert commands_in(part) == {"dcnet attack this --workers 7"}


def test_evaluation_of_an_experiment_has_its_reproduce_command(tmp_path: Path):
    found = {"epsilon": 8 / 255, "images": 10_000, "by_epsilon": {"0.1": 0.5}, "by_steps": {"20": 0.1, "5": 0.2}}
    part = robustness(tmp_path, attacks=found)
    headings = [node.text for node in part.all("h3")]
    assert headings == ["cnn9-small on digits: FGSM by epsilon", "cnn9-small on digits: BIM by steps"]
    assert "On 10,000 perturbed test images, within 8/255 of each pixel" in part.all("figcaption")[1].text
    assert commands_in(part) == {"dcnet reproduce table7 table8"}


def test_unknown_evaluation_has_no_command(tmp_path: Path):
    part = robustness(tmp_path, card={"by_epsilon": CURVE}, verify={"accuracy": 0.5})
    assert part.one("h3").text == "cnn9-small on digits: card by epsilon"
    assert commands_in(part) == {UNKNOWN_COMMAND}


def test_cards_of_different_efforts_have_separate_charts(tmp_path: Path):
    part = robustness(tmp_path, **{"attack-8/255-1000-images": card(), "attack-8/255-1000-images-quick": card(QUICK)})
    assert len(part.all("figure")) == 4
    assert [QUICK_NOTE in one.text for one in part.all("figcaption")] == [False, False, True, False]


def lines_of(folder: Path, count: int) -> dict[str, list[str]]:
    """The line names of the charts of `count` runs, two of them with adversarial training."""
    for seed in range(count):
        changes = {"seed": seed, "adversary": "fgsm(epsilon=8/255)" if seed < 2 else None}
        run = a_run(evaluations={"card": {"by_epsilon": CURVE}}, config=a_run()["config"] | changes, hash=str(seed))
        put(folder, str(seed), run)
    part = drawn(folder).one("section", id="robustness")
    names = [[line["name"] for line in values_of(figure)["lines"]] for figure in part.all("figure")]
    return dict(zip((heading.text for heading in part.all("h3")), names, strict=True))


def test_many_lines_are_split_by_type_of_training(tmp_path: Path):
    operator, trained = a_run()["config"]["operator"], "trained with fgsm(epsilon=8/255)"
    few = [f"{operator}, {trained}, seed {seed}" for seed in (0, 1)] + [
        f"{operator}, seed {seed}" for seed in range(2, 8)
    ]
    assert lines_of(tmp_path / "few", 8) == {"cnn9-small on digits: card by epsilon": few}
    assert lines_of(tmp_path / "many", 9) == {
        f"cnn9-small on digits, {trained}: card by epsilon": [f"{operator}, seed {seed}" for seed in (0, 1)],
        "cnn9-small on digits, standard training: card by epsilon": [
            f"{operator}, seed {seed}" for seed in range(2, 9)
        ],
    }
