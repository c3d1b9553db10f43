"""Every table of the paper is there, whole, and can be run."""

import collections
import dataclasses
import re
import shlex
from pathlib import Path

import pytest
import torch
import tyro
from torch import nn

from dcnet.cli.commands.train import Command
from dcnet.experiments import chosen, experiment, experiments
from dcnet.experiments.catalogue import attacks
from dcnet.experiments.catalogue.attacks import source_of
from dcnet.experiments.experiment import NOT_CONVERGED
from dcnet.training.build import build_model
from dcnet.training.recipes import command_of

DOCS = Path(__file__).parents[2] / "docs/reproducing.md"
# Cells and runs behind them.
SIZES = {
    "table1": (6, 6),
    "table2": (10, 10),
    "table3": (30, 30),
    "table4": (22, 22),
    "table5": (9, 4),
    "table6": (12, 12),
}


@pytest.mark.parametrize("name", SIZES)
def test_tables_of_the_paper_are_whole(name):
    (experiment,) = chosen([name])
    assert (len(experiment.cells), sum(cell.config is not None for cell in experiment.cells)) == SIZES[name]
    assert all(cell.paper is not None for cell in experiment.cells)


@pytest.mark.parametrize("name", sorted(experiments))
def test_no_place_is_taken_twice_and_no_two_cells_of_one_metric_share_their_runs(name):
    (experiment,) = chosen([name])
    assert experiment.name == name
    places = collections.Counter((cell.row, cell.column) for cell in experiment.cells)
    assert max(places.values()) == 1
    runs = collections.Counter((*cell.configs(1), cell.metric) for cell in experiment.cells if cell.config)
    assert max(runs.values()) == 1


@pytest.mark.parametrize("name", sorted(experiments))
def test_the_command_of_every_run_is_that_run(name):
    (experiment,) = chosen([name])
    for config in {cell.config for cell in experiment.cells if cell.config}:
        words = shlex.split(command_of(config))[2:]
        command = tyro.cli(Command, args=words, config=(tyro.conf.FlagCreatePairsOff,))
        assert command._configs() == [config]


def test_some_cells_by_hand():
    cell = chosen(["table3"])[0].cell("seg", "sqcos, no ReLU")
    assert (cell.paper, cell.config.operator, cell.config.activation) == (24.29, "seg-sqcos", "none")
    assert (cell.config.model, cell.config.steps, cell.config.projection_every) == ("cnn9", 42_500, 100)
    cell = chosen(["table2"])[0].cell("linear", "sqcos")
    assert (cell.paper, cell.config.norm, cell.config.activation) == (NOT_CONVERGED, "none", None)
    cell = chosen(["table1"])[0].cell("weighted gradients", "tanh-cos")
    assert (cell.config.projection_every, cell.config.weighted_gradients) == (0, "gradient")
    assert chosen(["table4"])[0].columns == ["linear", "cos", "sqcos"]


def test_tables_share_their_runs():
    projected = chosen(["table1"])[0].cell("weight projection", "tanh-cos").config
    assert projected == chosen(["table4"])[0].cell("tanh", "cos").config
    assert projected == chosen(["table5"])[0].cell("DCNet-32, tanh-cos", "cifar100").config


def test_causes_change_networks_of_tables_2_to_4_and_leave_the_rest_of_them_alone():
    (causes,) = chosen(["causes"])
    tables = {cell.config for table in chosen(["table2", "table3", "table4"]) for cell in table.cells}
    own = {(cell.row, cell.column): cell.config for cell in causes.cells if cell.config not in tables}
    changed = {
        place: _changed(config, causes.cell(place[0].split(",")[0], place[1]).config) for place, config in own.items()
    }
    assert changed == {
        ("plain, no decay", "CNN-9"): {"weight_decay": 0.0},
        ("plain, no normalisation", "CNN-9, no ReLU"): {"norm": "none"},
        ("linear-cos, no projection", "CNN-9"): {"projection_every": 0},
        ("linear-cos, no projection", "ResNet-32"): {"projection_every": 0},
        ("linear-cos, no constraint", "CNN-9"): {"orthonormal": 0.0},
        ("linear-cos, neither", "CNN-9"): {"projection_every": 0, "orthonormal": 0.0},
        ("mix-cos, alpha 0.1", "CNN-9, no ReLU"): {"operator": "mix(scale=0.1)-cos"},
    }


def _changed(config, base):
    given = dataclasses.asdict(base)
    return {name: value for name, value in dataclasses.asdict(config).items() if value != given[name]}


def test_the_experiment_of_the_docs_can_be_chosen(monkeypatch):
    monkeypatch.setattr(experiment, "experiments", dict(experiment.experiments))
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    exec(code, {})
    (found,) = chosen(["widths"])
    assert (found.rows, found.columns) == (["conv", "tanh-cos"], ["width 0.25", "width 0.5"])


def test_the_docs_name_every_experiment_and_its_runs():
    rows = re.findall(r"\| `(\w+)` \|.*\| (\d+) \|", DOCS.read_text())
    counts = {}
    for name, make in experiments.items():
        found = make()
        counts[name] = len({config for cell in found.cells for config in cell.configs(found.seeds)})
    assert {name: int(count) for name, count in rows} == counts


def test_all_are_chosen_at_once_and_none_twice():
    names = [experiment.name for experiment in chosen(["all"])]
    assert sorted(names) == sorted(experiments)
    assert names[:8] == [f"table{number}" for number in range(1, 9)]
    assert [experiment.name for experiment in chosen(["table2", "table1", "table2"])] == ["table2", "table1"]


def test_an_unknown_experiment_is_an_error_that_names_the_others():
    with pytest.raises(ValueError, match=r"table33.*table3"):
        chosen(["table33"])


@pytest.mark.parametrize("cell", chosen(["table2"])[0].cells, ids=lambda cell: f"{cell.row}-{cell.column}")
def test_networks_that_do_not_converge_without_normalisation_give_nothing_at_all(cell):
    torch.manual_seed(0)
    model = build_model(dataclasses.replace(cell.config, width=0.25), 100, 3, 32).train()
    logits = model(torch.rand(4, 3, 32, 32))
    assert (logits.abs().max() == 0) == (cell.paper == NOT_CONVERGED)


def test_black_box_attacks_come_from_networks_that_are_trained_and_are_not_under_attack():
    (table,) = chosen(["table8"])
    runs = {config for cell in table.cells for config in cell.configs(table.seeds)}
    attacked = {config for cell in table.cells if cell.evaluation for config in cell.configs(table.seeds)}
    sources = {source_of(config) for config in attacked}
    assert sources == runs - attacked
    assert {config.operator for config in sources} == {"conv"}
    assert {config.adversary for config in sources} == {None, "fgsm(epsilon=6/255)"}


def test_attacks_are_measured_away_from_labels_and_from_answers(monkeypatch, tmp_path):
    """A linear network of two classes, of which it is known how far each image is from the other one."""
    torch.manual_seed(0)
    linear = nn.Linear(16, 2)
    linear.bias.data = -0.5 * linear.weight.data.sum(1)
    model = nn.Sequential(nn.Flatten(), linear).eval()
    images, labels = 0.3 + 0.4 * torch.rand(200, 1, 4, 4), torch.randint(2, (200,))
    monkeypatch.setattr(attacks, "load_model", lambda run: (model, {}))
    monkeypatch.setattr(attacks, "images_to_attack", lambda *_: (images, labels))
    config = attacks.config("baseline", "natural")
    found = attacks.attacks_of(model, {"config": config.described()}, tmp_path, None)
    difference = (linear.weight[1] - linear.weight[0]).detach()
    margin = ((images - 0.5).flatten(1) @ difference) * (2 * labels - 1)
    reach = attacks.EPSILON * difference.abs().sum()
    assert found["clean"] == pytest.approx((margin > 0).double().mean().item())
    assert found["white_box"]["fgsm"] == pytest.approx((margin > reach).double().mean().item())
    # Those that are wrong are moved away from the wrong class, too, and some of them over to the right one.
    right = (margin > reach) | ((margin < 0) & (margin > -reach))
    assert found["fgsm_by_answer"] == pytest.approx(right.double().mean().item())
    assert found["fgsm_by_answer"] != found["white_box"]["fgsm"]
