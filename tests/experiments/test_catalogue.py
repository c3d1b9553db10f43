"""Every table of the paper is complete and can be run."""

import collections
import dataclasses
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from dcnet.cli.app import parse
from dcnet.data import Augmentation
from dcnet.experiments import experiments, get_experiment, select_experiments
from dcnet.experiments.catalogue import attack_tables, corruption_contest, speedruns
from dcnet.experiments.catalogue.attack_tables import source_of
from dcnet.experiments.catalogue.imagenet_table import top_5_of
from dcnet.experiments.experiment import NOT_CONVERGED, Cell
from dcnet.experiments.status import RecordIndex, cell_records
from dcnet.losses.margins import as_margin
from dcnet.robustness import uncertainty
from dcnet.robustness.corruptions import corrupt, registry
from dcnet.robustness.report_card import evaluate_attacks
from dcnet.training import Record, RunConfig
from dcnet.training.build import build_model
from dcnet.training.recipes import command_of

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs/reproducing.md"
# The numbers of cells and of their runs.
SIZES = {
    "table1": (10, 10),
    "table2": (10, 10),
    "table3": (30, 30),
    "table4": (22, 22),
    "table5": (9, 4),
    "table6": (12, 12),
}
# Rows that the paper does not have.
OWN_ROWS = {
    "table1": [
        "linearly weighted, no decay",
        "weighted, Eq. 15, no decay",
        "weighted, Eq. 16, no decay",
        "weighted gradients, on the update",
    ]
}


@pytest.mark.parametrize("name", SIZES)
def test_tables_of_the_paper_are_complete(name):
    experiment = get_experiment(name)
    assert (len(experiment.cells), sum(cell.config is not None for cell in experiment.cells)) == SIZES[name]
    ours = [cell.row for cell in experiment.cells if cell.paper is None]
    assert ours == OWN_ROWS.get(name, [])


@pytest.mark.parametrize("name", sorted(experiments))
def test_cells_are_unique(name):
    experiment = get_experiment(name)
    assert experiment.name == name
    places = collections.Counter((cell.row, cell.column) for cell in experiment.cells)
    assert max(places.values()) == 1
    runs = collections.Counter((*cell.configs(1), cell.metric) for cell in experiment.cells if cell.config)
    assert max(runs.values()) == 1


def configs_of_all_experiments():
    cells = [cell for experiment in select_experiments(["all"]) for cell in experiment.cells]
    return list(dict.fromkeys(cell.config for cell in cells if cell.config))


def different_configs():
    """Configs of all experiments; of those that differ in swept numbers alone, the first one."""
    numbers = {"lr", "weight_decay", "steps", "evaluate_every"}
    found = {}
    for config in configs_of_all_experiments():
        found.setdefault(str([value for name, value in vars(config).items() if name not in numbers]), config)
    return list(found.values())


@pytest.mark.parametrize("every", [16, pytest.param(1, marks=pytest.mark.slow)])
def test_commands_of_runs_round_trip(every):
    for config in different_configs()[::every]:
        words = shlex.split(command_of(config))[1:]
        command = parse(words)
        assert command._configs() == [config]


def test_configs_of_some_cells():
    cell = get_experiment("table3").cell("seg", "sqcos, no ReLU")
    assert (cell.paper, cell.config.operator, cell.config.activation) == (24.29, "seg-sqcos", "none")
    assert (cell.config.model, cell.config.steps, cell.config.projection_every) == ("cnn9", 42_500, 100)
    cell = get_experiment("table2").cell("linear", "sqcos")
    assert (cell.paper, cell.config.norm, cell.config.activation) == (NOT_CONVERGED, "none", None)
    cell = get_experiment("table1").cell("weighted gradients", "tanh-cos")
    assert (cell.config.projection_every, cell.config.weighted_gradients) == (0, "gradient")
    for row in ("linearly weighted", "weighted, Eq. 15", "weighted, Eq. 16"):
        decayed, other = (get_experiment("table1").cell(name, "tanh-cos").config for name in (row, f"{row}, no decay"))
        assert _changed(other, decayed) == {"decay_weighted": False}
    assert get_experiment("table4").columns == ["linear", "cos", "sqcos"]


def test_tables_share_their_runs():
    projected = get_experiment("table1").cell("weight projection", "tanh-cos").config
    assert projected == get_experiment("table4").cell("tanh", "cos").config
    # Table 5 has the same networks with the weight-normalized softmax.
    normalized = get_experiment("table5").cell("DCNet-32, tanh-cos", "cifar100").config
    assert _changed(normalized, projected) == {"classifier": "normalized"}


def test_ablations_change_one_part_of_the_recipe():
    causes = get_experiment("causes")
    tables = {cell.config for table in select_experiments(["table2", "table3", "table4"]) for cell in table.cells}
    own = {(cell.row, cell.column): cell.config for cell in causes.cells if cell.config not in tables}
    changed = {
        place: _changed(config, causes.cell(place[0].split(",")[0], place[1]).config) for place, config in own.items()
    }
    assert changed == {
        ("plain, no decay", "CNN-9"): {"weight_decay": 0.0},
        ("plain, no normalization", "CNN-9, no ReLU"): {"norm": "none"},
        ("linear-cos, no projection", "CNN-9"): {"projection_every": 0},
        ("linear-cos, no projection", "ResNet-32"): {"projection_every": 0},
        ("linear-cos, no constraint", "CNN-9"): {"orthonormal": 0.0},
        ("linear-cos, neither", "CNN-9"): {"projection_every": 0, "orthonormal": 0.0},
        ("mix-cos, alpha 0.1", "CNN-9, no ReLU"): {"operator": "mix(scale=0.1)-cos"},
    }


def test_outliers_start_from_their_cell_of_table_3():
    for name, row in (("plain_outlier", "baseline"), ("mix_outlier", "mix")):
        outlier, cell = get_experiment(name), get_experiment("table3").cell(row, "cos, no ReLU")
        assert outlier.cells[0].config == cell.config
        assert {other.paper for other in outlier.cells} == {cell.paper}
    changed = {
        cell.row: _changed(cell.config, outlier.cells[0].config)
        for outlier in select_experiments(["mix_outlier", "plain_outlier"])
        for cell in outlier.cells
    }
    assert changed == {
        "plain": {},
        "no normalization, no floor, variance kept": {"norm": "none", "log_floor": 0.0, "init_variance": 1.0},
        "decay 5e-3": {"weight_decay": 5e-3},
        "bare fully connected layer": {"model": "cnn9-bare"},
        "mix-cos": {},
        "alpha 0.1": {"operator": "mix(scale=0.1)-cos"},
        "alpha 0.01": {"operator": "mix(scale=0.01)-cos"},
    }
    assert get_experiment("mix_outlier").seeds == 3


def _changed(config, base):
    given = dataclasses.asdict(base)
    return {name: value for name, value in dataclasses.asdict(config).items() if value != given[name]}


CORRUPTED, UNCERTAIN, TRANSFORMER = "contest_corruptions", "contest_uncertainty", "contest_transformer"
DIGITS = ("contest_digits_batch_2", "contest_digits_few")
BATCHES = tuple(f"contest_small_batch_{count}" for count in (2, 4, 8, 128))
CONTESTS = [
    name
    for name, make in sorted(experiments.items())
    if make().rules is not None and name not in (CORRUPTED, UNCERTAIN, TRANSFORMER, *DIGITS, *BATCHES)
]


@pytest.mark.parametrize("name", CONTESTS)
def test_contests_try_held_out_images_and_then_all(name):
    found = get_experiment(name)
    rules = found.rules
    trials = {cell.config for cell in found.cells}
    assert {config.dataset for config in trials} == {"cifar100-validation"}
    finals = [one.config for side in rules.sides for one in side.candidates]
    assert {config.dataset for config in finals} == {"cifar100"}
    assert all(config.steps >= 2 * rules.trial["steps"] for config in finals)
    assert found.seeds >= 3
    for side in rules.sides:
        own = {one.config.operator for one in side.candidates}
        assert len(own) == 1
        assert side.reference == (own == {"conv"})
        optimizers = {one.config.optimizer for one in side.candidates}
        assert optimizers == ({"sgd", "adamw", "muon"} if side.reference else {"adam", "muon", "sphere-sgd"})
        # The first recipe of a family is the middle one, with an inner rate and decay.
        families = {one.family: one for one in reversed(side.candidates)}
        assert [side.edges(one) for one in families.values()] == [[], [], []]


@pytest.mark.parametrize("name", [*DIGITS, *BATCHES])
def test_contests_with_the_same_recipes_on_every_side(name):
    found = get_experiment(name)
    recipes = [[one.name for one in side.candidates] for side in found.rules.sides]
    assert all(each == recipes[0] for each in recipes)
    assert len(set(recipes[0])) == {"contest_digits_batch_2": 15, "contest_digits_few": 29}.get(name, 12)
    dataset = "digits" if name in DIGITS else "cifar100"
    assert {cell.config.dataset for cell in found.cells} == {f"{dataset}-validation"}
    assert {one.config.dataset for side in found.rules.sides for one in side.candidates} == {dataset}
    references = [side.name for side in found.rules.sides if side.reference]
    assert references == [side.name for side in found.rules.sides if side.name.startswith("plain")]
    settings = [{**vars(one.config), "seed": 0} for side in found.rules.sides for one in side.candidates]
    allowed = {"model", "operator", "norm", "norm_momentum"}
    allowed |= {"optimizer", "lr", "weight_decay", "momentum"}
    assert {name for name in settings[0] if len({str(each[name]) for each in settings}) > 1} <= allowed


def test_sides_of_the_contests():
    sides = {name: [side.name for side in get_experiment(name).rules.sides] for name in CONTESTS}
    operators = ["plain", "linear-cos", "seg-cos", "seg-linear", "seg-sqcos", "linear-sqcos", "tanh-cos"]
    assert sides["contest_resnet32"] == [*operators, "linear-sqcos, normalized classifier"]
    assert sides["contest_cnn9"] == [*sides["contest_resnet32"], "seg-sqcos, no ReLU"]
    few = get_experiment("contest_few_images_10").rules.sides
    assert {one.config.train_images for side in few for one in side.candidates} == {1_000}
    normalized = get_experiment("contest-resnet32").rules.sides[-1].candidates[0].config
    assert (normalized.operator, normalized.classifier) == ("linear-sqcos", "normalized")


def test_rates_of_small_batches():
    """Those of SGD are proportional to the batch size, and those of Adam to its root."""
    two, eight = (get_experiment(f"contest_small_batch_{count}").rules.sides[0].candidates for count in (2, 8))
    assert [{one.config.batch_size for one in side} for side in (two, eight)] == [{2}, {8}]
    ratios = {(a.family, round(b.config.lr / a.config.lr, 2)) for a, b in zip(two, eight, strict=True)}
    assert ratios == {("Adam", 2.0), ("AdamW", 2.0), ("SGD", 4.0)}


def test_the_contest_of_transformers():
    """Sides differ in the operator only, and all of them try the same recipes."""
    found = get_experiment(TRANSFORMER)
    assert {cell.config.dataset for cell in found.cells} == {"digits-validation"}
    sides = found.rules.sides
    assert [side.name for side in sides if side.reference] == ["plain"]
    base = sides[0].candidates[0].config
    for side in sides:
        changes = [_changed(one.config, base) for one in side.candidates]
        assert len({change.pop("operator", "conv") for change in changes}) == 1
        assert all(change.keys() <= {"lr", "weight_decay"} for change in changes)
        assert len(changes) == 20


def test_the_contest_on_corrupted_images():
    """Sides differ in operator, augmentation and standardization only; all of them try the same recipes."""
    found = get_experiment(CORRUPTED)
    assert {cell.config.dataset for cell in found.cells} == {"cifar10-validation"}
    configs = {side.name: [one.config for one in side.candidates] for side in found.rules.sides}
    assert {one.dataset for own in configs.values() for one in own} == {"cifar10"}
    plain = [name for name, (first, *_) in configs.items() if first.operator == "conv"]
    assert plain == ["plain", "plain, augmented", "plain, standardized", "plain, by channel", "plain, scaled"]
    assert [side.name for side in found.rules.sides if side.reference] == plain
    free = {"operator": "conv", "augmentation": Augmentation(), "standardize": "none"}
    same = {"projection_every": 0, "orthonormal": 0.0}
    assert len({tuple(dataclasses.replace(one, **free, **same) for one in own) for own in configs.values()}) == 1
    assert all(one.projection_every == 100 for name, own in configs.items() if name not in plain for one in own)
    for side in found.rules.sides:
        assert [one.config.optimizer for one in side.candidates] == 4 * ["sgd"] + 4 * ["adam"]
        assert [side.edges(one) for one in side.candidates] == 2 * [["rate"], [], [], ["rate"]]
        assert {one.family for one in side.candidates} == (
            {"SGD", "Adam"} if side.reference else {"SGD, projection", "Adam, projection"}
        )
    assert "SGD with rates 0.025 0.06 0.15 0.375 and decay 0.001" in found.notes[1]


def test_all_records_of_the_contest_on_corrupted_images_count(tmp_path):
    """Also those from before the sides had more recipes."""
    index = RecordIndex(tmp_path / "runs", [ROOT / "results/corruptions"])
    found = get_experiment(CORRUPTED).at(index.record)
    used = {record.run_name for _, records in cell_records(found, index) for record in records}
    assert used == set(index.imported)
    assert len(used) == 88


def test_errors_on_corrupted_images(monkeypatch, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4)).eval()
    images, labels = torch.rand(50, 1, 4, 4), torch.randint(4, (50,))
    monkeypatch.setattr(corruption_contest, "load_test_images", lambda *_: (images, labels))
    config = get_experiment(CORRUPTED).cells[0].config
    found = corruption_contest.corruptions_of(model, Record(config=config.described()), tmp_path, None)

    def error(pixels):
        return sum(int(model(one[None]).argmax() != label) for one, label in zip(pixels, labels, strict=True)) / 50

    errors = {kind: [error(corrupt(images, kind, severity)) for severity in range(1, 6)] for kind in registry}
    assert found["by_kind"] == {kind: pytest.approx(values) for kind, values in errors.items()}
    assert found["clean"] == pytest.approx(error(images))
    assert found["light"] == pytest.approx((sum(errors["contrast"]) + sum(errors["brightness"])) / 10)
    assert found["shade"] == pytest.approx(sum(errors["shade"]) / 5)
    assert found["all"] == pytest.approx(sum(map(sum, errors.values())) / 25)
    assert found["light"] != found["all"]
    for measure, name in zip(get_experiment(CORRUPTED).rules.measures, ("light", "shade", "all"), strict=False):
        cell = Cell("row", measure.name, config, None, measure.metric, measure.factor)
        value = cell.value(Record.from_json({"evaluations": {measure.evaluation: found}}))
        assert value == pytest.approx(100 * found[name])


def test_both_contests_on_other_images_have_the_same_runs():
    first, second = (get_experiment(name) for name in (CORRUPTED, UNCERTAIN))
    assert first.cells == second.cells
    assert first.rules.sides == second.rules.sides


def test_uncertainty_of_a_network(monkeypatch, tmp_path):
    """Scores by plain loops; images of other classes come from CIFAR-100."""
    torch.manual_seed(0)
    config = get_experiment(UNCERTAIN).rules.sides[0].candidates[0].config
    model = build_model(dataclasses.replace(config, width=0.1), 10, 3, 32).eval()
    images = {"cifar10": torch.rand(12, 3, 32, 32), "cifar100": 0.5 * torch.rand(9, 3, 32, 32)}
    labels = torch.randint(10, (12,))
    monkeypatch.setattr(corruption_contest, "load_test_images", lambda own, *_: (images[own.dataset], labels))
    found = corruption_contest.uncertainty_of(model, Record(config=config.described()), tmp_path, None)

    def scores(image):
        features, weight = model.features(image[None])[0], model.network.classifier.weight
        cosines = [torch.dot(features, row) / (features.norm() * row.norm()) for row in weight]
        probabilities = (model(image[None])[0]).softmax(0)
        return {"confidence": max(probabilities), "norm": features.norm(), "angle": max(cosines)}

    with torch.no_grad():
        known, unknown = ([scores(image) for image in images[name]] for name in ("cifar10", "cifar100"))
        logits = model(images["cifar10"])
    for name in ("confidence", "norm", "angle"):
        wrong = sum(one[name] < other[name] for one in known for other in unknown) / (12 * 9)
        assert found["unknown"][name] == pytest.approx(float(wrong), abs=0.02)
    assert found["calibration"] == pytest.approx(uncertainty.calibration_error(logits, labels), abs=1e-5)
    assert found["scaled_calibration"] == pytest.approx(uncertainty.scaled_calibration_error(logits, labels), abs=1e-4)


def test_speedruns_have_as_many_trials_on_each_side_and_run_the_chosen_ones():
    trials, chosen = get_experiment("speedrun_trials"), get_experiment("speedrun")
    for network, sides in speedruns.CHOSEN.items():
        counts = {side: sum(row.startswith(f"{network}, {side}, ") for row in trials.rows) for side in sides}
        assert len(set(counts.values())) == 1
        assert min(counts.values()) >= 8
        for side, trial in sides.items():
            tried = trials.cell(f"{network}, {side}, {trial}", "accuracy, %").config
            assert tried.dataset == "cifar100-validation"
            final = chosen.cell(f"{network}, {side}", "accuracy, %").config
            assert final == dataclasses.replace(tried, dataset="cifar100")
    assert chosen.seeds >= 10
    linear, tanh = (chosen.cell(f"speednet, {side}", "accuracy, %").config for side in ("linear-cos", "tanh-cos"))
    assert linear == dataclasses.replace(tanh, operator="linear-cos")
    for cell in (*trials.cells, *chosen.cells):
        # The only evaluation is that of the last step.
        assert cell.config.evaluate_every == cell.config.steps
    for network, batch_size, factor in (("ResNet-32", 1_024, 2**0.5), ("speednet", 512, 0.5**0.5)):
        larger = trials.cell(f"{network}, plain, batches of {batch_size:,}", "accuracy, %").config
        assert larger.lr == pytest.approx(factor * speedruns.RATES[network]["plain"][1], rel=1e-2)
        assert larger.lr * larger.other_rate == pytest.approx(speedruns.ADAMW, rel=1e-2)
    faster = trials.cell("speednet, tanh-cos, AdamW 0.005", "accuracy, %").config
    assert faster.lr * faster.other_rate == pytest.approx(0.005, rel=1e-2)


def test_seconds_of_a_speedrun_are_those_of_all_steps():
    cell = get_experiment("speedrun").cell("speednet, plain", "training, s")
    record = Record.from_json({"timings": {"step_ms": 4.0, "training": 3.0}})
    assert cell.value(record) == pytest.approx(4.0 * cell.config.steps / 1000)


def test_digits_in_shade():
    """Columns are levels of the shade; each row has its own network, trained on the digits."""
    found = get_experiment("digits_in_shade")
    assert found.columns == ["even light", "40% light", "20% light", "5% light", "noise"]
    assert {cell.config.dataset for cell in found.cells} == {"digits"}
    assert len({cell.config for cell in found.cells}) == len(found.rows) == 5
    shades, noises = [0.01, 0.02, 0.03, 0.04, 0.05], [0.1, 0.2, 0.3, 0.4, 0.5]
    evaluated = {"corruptions": {"by_kind": {"shade": shades, "noise": noises}}}
    record = Record.from_json({"results": {"test_error": 7.0}, "evaluations": evaluated})
    values = [cell.value(record) for cell in found.cells if cell.row == "plain"]
    assert values == pytest.approx([7.0, 3.0, 4.0, 5.0, 50.0])


def test_the_experiment_of_the_docs_can_be_selected(monkeypatch):
    monkeypatch.setattr(experiments, "_entries", dict(experiments))
    code, *_ = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    exec(code, {})
    found = get_experiment("widths")
    assert (found.rows, found.columns) == (["conv", "tanh-cos"], ["width 0.25", "width 0.5"])


def test_the_docs_list_every_experiment_and_its_runs():
    rows = re.findall(r"\| `(\w+)` \|.*\| (\d+) \|", DOCS.read_text())
    counts = {}
    for name, make in experiments.items():
        found = make()
        runs = {config for cell in found.cells for config in cell.configs(found.seeds)}
        counts[name] = len(runs) if found.rules is None else found.rules.runs(found.seeds)
    assert {name: int(count) for name, count in rows} == counts


def test_select_all_and_without_duplicates():
    names = [experiment.name for experiment in select_experiments(["all"])]
    assert sorted(names) == sorted(experiments)
    assert names[:8] == [f"table{number}" for number in range(1, 9)]
    assert [experiment.name for experiment in select_experiments(["table2", "table1", "table2"])] == [
        "table2",
        "table1",
    ]


def test_error_for_an_unknown_experiment():
    with pytest.raises(ValueError, match=r"table33.*table3"):
        select_experiments(["table33"])


@pytest.mark.parametrize("cell", get_experiment("table2").cells, ids=lambda cell: f"{cell.row}-{cell.column}")
def test_networks_that_do_not_converge_have_zero_logits(cell):
    torch.manual_seed(0)
    model = build_model(dataclasses.replace(cell.config, width=0.25), 100, 3, 32).train()
    logits = model(torch.rand(4, 3, 32, 32))
    assert (logits.abs().max() == 0) == (cell.paper == NOT_CONVERGED)


def test_sources_of_black_box_attacks_are_trained_and_not_attacked():
    table = get_experiment("table8")
    runs = {config for cell in table.cells for config in cell.configs(table.seeds)}
    attacked = {config for cell in table.cells if cell.evaluation for config in cell.configs(table.seeds)}
    sources = {source_of(config) for config in attacked}
    assert sources == runs - attacked
    assert {config.operator for config in sources} == {"conv"}
    assert {config.adversary for config in sources} == {None, "fgsm(epsilon=6/255)"}


def test_fgsm_away_from_labels_and_from_predictions(monkeypatch, tmp_path):
    """On a linear network of two classes, for which the distance to the boundary is known."""
    torch.manual_seed(0)
    linear = nn.Linear(16, 2)
    linear.bias.data = -0.5 * linear.weight.data.sum(1)
    model = nn.Sequential(nn.Flatten(), linear).eval()
    images, labels = 0.3 + 0.4 * torch.rand(200, 1, 4, 4), torch.randint(2, (200,))
    monkeypatch.setattr(attack_tables, "load_model", lambda run: (model, {}))
    monkeypatch.setattr(attack_tables, "load_test_images", lambda *_: (images, labels))
    config = attack_tables.config("baseline", "natural")
    found = attack_tables.attacks_of(model, Record(config=config.described()), tmp_path, None)
    difference = (linear.weight[1] - linear.weight[0]).detach()
    margin = ((images - 0.5).flatten(1) @ difference) * (2 * labels - 1)
    reach = attack_tables.EPSILON * difference.abs().sum()
    assert found["clean"] == pytest.approx((margin > 0).double().mean().item())
    assert found["white_box"]["fgsm"] == pytest.approx((margin > reach).double().mean().item())
    # Images with a wrong prediction move away from that class, too, and some of them become correct.
    right = (margin > reach) | ((margin < 0) & (margin > -reach))
    assert found["fgsm_by_answer"] == pytest.approx(right.double().mean().item())
    assert found["fgsm_by_answer"] != found["white_box"]["fgsm"]


# --- the choice of the attacks' settings ---


def numbers(fgsm, bim, other_fgsm, other_bim):
    return {"white_box": {"fgsm": fgsm, "bim": bim}, "black_box": {"fgsm": other_fgsm, "bim": other_bim}}


def test_distance_sums_over_four_numbers():
    assert attack_tables.distance(numbers(0.1882, 0.0867, 0.5090, 0.3622)) == pytest.approx(0)
    assert attack_tables.distance(numbers(0.1782, 0.1067, 0.5390, 0.3222)) == pytest.approx(0.01 + 0.02 + 0.03 + 0.04)


def test_the_settings_of_the_tables_are_compared():
    assert round(attack_tables.EPSILON * 255) in attack_tables.EPSILONS
    assert attack_tables.BIM_STEPS in attack_tables.STEPS
    table = get_experiment("attack_choice")
    (source,) = table.cell("test error", "its source").configs(1)
    assert source == attack_tables.source_of(table.cells[0].configs(1)[0])


def test_choices_use_their_epsilon_and_steps(monkeypatch, tmp_path):
    torch.manual_seed(0)
    model, source = (nn.Sequential(nn.Flatten(), nn.Linear(16, 10)).eval() for _ in range(2))
    images, labels = torch.rand(200, 1, 4, 4), torch.randint(10, (200,))
    monkeypatch.setattr(attack_tables, "load_model", lambda run: (source, {}))
    monkeypatch.setattr(attack_tables, "load_test_images", lambda *_: (images, labels))
    monkeypatch.setattr(attack_tables, "CHOICE_IMAGES", 100)
    record = Record(config=attack_tables.config("baseline", "natural").described())
    found = attack_tables.choices_of(model, record, tmp_path, None)
    wanted = evaluate_attacks(model, images[:100], labels[:100], source, epsilon=7 / 255, steps=3)
    assert found["7/255"]["3"] == {**wanted, "distance": attack_tables.distance(wanted)}
    table = get_experiment("attack_choice")
    value = table.cell("7/255", "3 steps").value(Record.from_json({"evaluations": {attack_tables.CHOICE: found}}))
    assert value == pytest.approx(100 * attack_tables.distance(wanted))


# --- ImageNet ---

CLASSES, PER_CLASS = 8, 2


@pytest.fixture
def images(tmp_path):
    """Images of eight classes; the gray level is the class."""
    for part in ("train", "val"):
        for label in range(CLASSES):
            folder = tmp_path / part / f"class{label}"
            folder.mkdir(parents=True)
            for number in range(PER_CLASS):
                Image.fromarray(np.full((16, 16, 3), 30 * label, np.uint8)).save(folder / f"{number}.png")
    return tmp_path


class Likes(nn.Module):
    """A network that ranks the same favorite classes first for every image."""

    def __init__(self, favorites):
        super().__init__()
        self.favorites, self.weight = favorites, nn.Parameter(torch.zeros(()))

    def forward(self, x):
        scores = torch.zeros(len(x), CLASSES)
        scores[:, self.favorites] = torch.arange(len(self.favorites), 0, -1.0)
        return scores + self.weight


@pytest.mark.parametrize(("favorites", "error"), [([0, 1, 2, 3, 4], 37.5), ([7, 6, 5, 0, 1, 2, 3, 4], 37.5)])
def test_top_5_error(images, favorites, error):
    config = RunConfig(dataset="imagefolder", model="resnet18", image_size=14, batch_size=5, steps=1)
    found = top_5_of(Likes(favorites), Record(config=config.described()), images, images)
    assert found == {"error": error}


def test_table6_runs_with_a_folder_of_images(images, tmp_path):
    table = get_experiment("table6")
    assert "it needs ImageNet" in table.not_run
    assert table.with_data(tmp_path / "nowhere").not_run == table.not_run
    assert table.with_data(images).not_run is None
    assert {cell.metric for cell in table.cells} == {("evaluations", "top-5", "error")}


NEW_MARGINS = ("combined", "subcenter-arcface", "curricularface", "elastic-arcface", "elastic-cosface", "magface")


@pytest.mark.parametrize("name", ["faces", "open_set"])
def test_margins_of_unseen_people_and_classes(name):
    """All margins with plain networks, five with decoupled ones; the settings of earlier records stay."""
    found = get_experiment(name)
    configs = {cell.row: cell.config for cell in found.cells}
    assert found.seeds == 3
    assert {f"{margin}, conv" for margin in (*NEW_MARGINS, "adaface", "uniface")} <= set(configs)
    decoupled = [row.removesuffix(", tanh-cos") for row in configs if row.endswith("tanh-cos")]
    assert decoupled == ["softmax", "a-softmax", "am-softmax", "sphereface-r", "adaface"]
    for row, config in configs.items():
        margin, operator = row.split(", ")
        assert (config.margin, config.operator.startswith("tanh")) == (margin, operator == "tanh-cos")
        # With their default scale of 64, features collapse.
        assert config.margin_scale == 16 or as_margin(margin).scale != 64


@pytest.mark.parametrize("name", ["faces", "open_set"])
def test_earlier_records_of_unseen_people_and_classes_are_used(name):
    index = RecordIndex(ROOT / "none", [ROOT / "results"])
    old = [cell for cell in get_experiment(name).cells if cell.row.partition(",")[0] in ("softmax", "a-softmax")]
    assert old
    assert all(index.record(config) is not None for cell in old for config in cell.configs(3))
