"""Collapses of one-step training: the criterion, Fisher's test against scipy, and the sentence about a table."""

import json

import pytest
import torch
from helpers.fake_records import small
from scipy import stats
from torch import nn

from dcnet.experiments import Cell, CellStatus, Experiment, get_experiment
from dcnet.experiments.catalogue import one_step
from dcnet.experiments.collapse import collapsed, find_collapses, fisher_p
from dcnet.experiments.findings import findings_of
from dcnet.robustness import accuracy, perturb
from dcnet.training import Record


@pytest.mark.parametrize(
    ("fgsm", "pgd", "expected"),
    [(85, 1, True), (60, 19.9, True), (60, 20, False), (30, 15, False), (30, 14.9, True), (12, 9, False)],
)
def test_a_collapsed_network_withstands_one_step_but_not_many(fgsm, pgd, expected):
    assert collapsed(fgsm, pgd) is expected


@pytest.mark.parametrize("others", [8, 5])
def test_fisher_matches_scipy(others):
    for first in range(9):
        for second in range(others + 1):
            table = [[first, 8 - first], [second, others - second]]
            expected = stats.fisher_exact(table).pvalue
            assert fisher_p((first, 8), (second, others)) == pytest.approx(expected, rel=1e-6)


HELD, LOST = (50.0, 40.0), (80.0, 1.0)


def statuses(runs: dict[str, list[tuple[float, float]]], seeds: int = 8) -> list[CellStatus]:
    return [
        CellStatus(Cell(row, column, small()), tuple(pair[place] for pair in pairs), 0, seeds)
        for row, pairs in runs.items()
        for place, column in enumerate(("FGSM", "PGD-50"))
    ]


def experiment(rows: list[CellStatus], collapses: bool = True) -> Experiment:
    return Experiment("one", "one", tuple(one.cell for one in rows), seeds=8, collapses=collapses)


def varied(count: int, pgd: float) -> list[tuple[float, float]]:
    return [(50.0, pgd + 0.1 * i) for i in range(count)]


RUNS = {
    "plain": [*varied(1, 40.0), *[LOST] * 7],
    "plain, N-FGSM": varied(8, 39.0),
    "linear-cos": [*varied(2, 41.0), *[LOST] * 6],
    "tanh-cos": varied(8, 41.0),
}


def test_the_finding_counts_collapses_and_compares_with_plain_networks():
    found = find_collapses(experiment(rows := statuses(RUNS)), rows)
    counts = {row.name: (row.collapsed, row.runs) for row in found.rows}
    assert counts == {"plain": (7, 8), "plain, N-FGSM": (0, 8), "linear-cos": (6, 8), "tanh-cos": (0, 8)}
    by_name = {row.name: row for row in found.rows}
    # Two challengers: Holm's method doubles the smaller p-value.
    few, many = (stats.fisher_exact([[7, 1], [own, 8 - own]]).pvalue for own in (0, 6))
    assert by_name["tanh-cos"].collapse_p == pytest.approx(2 * few)
    assert by_name["linear-cos"].collapse_p == pytest.approx(many)
    pgd = {name: [pair[1] for pair in pairs] for name, pairs in RUNS.items()}
    welch = {name: stats.ttest_ind(pgd[name], pgd["plain, N-FGSM"], equal_var=False).pvalue for name in pgd}
    assert by_name["tanh-cos"].pgd_p == pytest.approx(2 * welch["tanh-cos"])
    assert by_name["linear-cos"].pgd_p == pytest.approx(max(welch["linear-cos"], 2 * welch["tanh-cos"]))
    assert by_name["plain"].collapse_p is by_name["plain"].pgd_p is None
    assert str(found) == (
        'Collapsed runs: 7 of 8 of "plain", 0 of 8 of "plain, N-FGSM", 6 of 8 of "linear-cos", 0 of 8 of "tanh-cos". '
        'No significant difference in collapses between "linear-cos" and "plain" (Fisher: p = 1); PGD-50, against '
        '"plain, N-FGSM": 11.01 against 39.35 % (Welch: p = 0.0035). '
        'Fewer collapses of "tanh-cos" than of "plain" (Fisher: p = 0.0028); PGD-50, against "plain, N-FGSM": 41.35 '
        f"against 39.35 % (Welch: p = {by_name['tanh-cos'].pgd_p:.2g})."
    )
    assert json.loads(json.dumps(found.to_json()))["rows"][0]["collapsed"] == 7
    assert findings_of(experiment(rows), rows)["collapses"] == found


def test_more_collapses_than_the_plain_network():
    rows = statuses({"plain": varied(8, 40.0), "sphere-cos": [LOST] * 8})
    assert 'More collapses of "sphere-cos" than of "plain"' in str(find_collapses(experiment(rows), rows))


def test_no_finding_for_other_tables_and_missing_runs():
    rows = statuses(RUNS)
    assert find_collapses(experiment(rows, collapses=False), rows) is None
    fewer = statuses(RUNS, seeds=9)
    assert find_collapses(experiment(fewer), fewer) is None
    alone = statuses({"tanh-cos": varied(8, 41.0)})
    assert find_collapses(experiment(alone), alone) is None


def test_sides_differ_from_the_plain_one_as_their_names_say():
    plain = one_step.one_step_config("plain", 1.0)
    assert plain.adversary == "fgsm(share=1.0)"
    assert plain.weight_decay > 0
    assert one_step.one_step_config("plain, no decay", 1.0).weight_decay == 0
    assert {one_step.one_step_config("plain, N-FGSM", share).adversary for share in (0.5, 1.0)} == {"n-fgsm"}
    for name in ("contest_one_step", "contest-one-step-mixed"):
        found = get_experiment(name)
        assert found.rows == list(one_step.SIDES)
        assert {cell.config.dataset for cell in found.cells} == {"cifar10"}
        assert (found.seeds, found.collapses) == (8, True)


def test_one_step_measures_all_three_accuracies(monkeypatch, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 10)).eval()
    images, labels = torch.rand(60, 1, 4, 4), torch.randint(10, (60,))
    monkeypatch.setattr(one_step, "load_test_images", lambda *_: (images, labels))
    monkeypatch.setattr(one_step, "IMAGES", 40)
    record = Record(config=one_step.one_step_config("plain", 1.0).described())
    found = one_step.one_step_of(model, record, tmp_path, None)
    images, labels = images[:40], labels[:40]
    assert found["clean"] == accuracy(model, images, labels)
    for name, settings in {"fgsm": {}, "pgd": {"steps": 50}}.items():
        moved = perturb(model, images, labels, name, epsilon=8 / 255, **settings)
        assert found[name] == accuracy(model, moved, labels)
    assert (found["epsilon"], found["images"]) == (8 / 255, 40)
