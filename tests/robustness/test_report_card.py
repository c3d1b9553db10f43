"""Report cards: measurements, resuming, and detection of masked gradients."""

import json
import sys
from typing import Any

import pytest
import torch
from helpers.attacked_networks import attacked, linear
from helpers.card_subjects import CLASSES, EFFORT, Hidden, honest, subject
from torch import nn

import dcnet
from dcnet.robustness import accuracy, attacks, corruptions
from dcnet.robustness.report_card import epsilons, evaluate_attacks, measurements, report_card
from dcnet.robustness.subject import Effort, Subject, check_pixels
from dcnet.robustness.verdict import run_checks


def failed(results: dict[str, Any]) -> set[str]:
    return {check.name for check in run_checks(results) if check.passed is False}


def test_report_card_matches_single_attacks():
    given = subject(source=honest(6), epsilon=0.02)
    model, x, y = given.model, given.images, given.labels
    card = report_card(given)
    assert list(card) == list(measurements)
    assert card["clean"]["accuracy"] == 39 / 40 == accuracy(model, x, y)
    for name, settings in {"fgsm": {}, "bim": {"steps": 4}, "pgd": {"steps": 6}, "square": {"queries": 30}}.items():
        found = getattr(attacks, name)(model, x, y, epsilon=0.02, **settings)
        assert card[name]["accuracy"] == accuracy(model, found, y)
        moved = attacks.perturb(model, x, y, name, epsilon=0.02, source=given.source, **settings)
        if name != "square":
            assert card["transfer"]["accuracies"][name] == accuracy(model, moved, y)
    assert card["transfer"]["source_accuracy"] == accuracy(given.source, x, y)
    assert card["corrupted"]["accuracies"] == corruptions.accuracies(model, x, y)
    assert card["clean"]["accuracy"] > card["transfer"]["accuracies"]["fgsm"] > card["fgsm"]["accuracy"] > 0
    json.dumps(card, allow_nan=False)


def test_curve_ends_at_zero_accuracy():
    found = report_card(subject())["by_epsilon"]
    assert found["accuracies"][0] == 39 / 40
    assert found["accuracies"][-1] == 0 < found["accuracies"][-2]
    assert 0.05 in found["epsilons"]
    for around in (8 / 255, 0.05, 1.0, 0.001):
        budgets = epsilons(around)
        assert (budgets[0], budgets[-1]) == (0, 1)
        assert budgets == sorted(set(budgets))
        assert budgets[1] == pytest.approx(around / 8)


def test_network_without_masking_passes_all_checks():
    assert failed(report_card(subject(source=honest(6)))) == set()


@pytest.mark.parametrize("way", ["rounding", "sure"])
def test_checks_detect_masked_gradients(way: str):
    """Several checks fail, although the accuracy under PGD looks good."""
    masked = report_card(subject(Hidden(honest(), way), source=honest()))
    plain = report_card(subject())
    assert masked["pgd"]["accuracy"] > plain["pgd"]["accuracy"] + 0.2
    assert masked["gradients"]["zero"] > 0.5
    assert failed(masked) >= {"white box", "zero gradients"}
    assert ("loss" in failed(masked)) == (way == "rounding")


def test_constant_network_fails_checks():
    class Constant(nn.Module):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return torch.stack([0 * input.sum((1, 2, 3)) + 1, 0 * input.sum((1, 2, 3))], 1)

    x = torch.rand(10, 3, 5, 5)
    found = report_card(Subject(Constant(), x, torch.zeros(10, dtype=torch.int64), effort=EFFORT))
    assert {"unbounded", "zero gradients", "loss"} <= failed(found)
    assert found["by_epsilon"]["epsilons"][-1] == 1


def test_report_card_resumes_after_an_interrupt():
    kept: dict[str, Any] = {}

    def until_bim(name: str, results: dict[str, Any]) -> None:
        kept.update(results)
        if name == "bim":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        report_card(subject(), ends=until_bim)
    assert list(kept) == ["clean", "gradients", "surface", "fgsm", "bim"]
    kept["fgsm"]["accuracy"] = 0.123
    started: list[str] = []
    card = report_card(subject(), kept, begins=started.append)
    assert started == list(measurements)[5:]
    assert card["fgsm"]["accuracy"] == 0.123
    whole = report_card(subject())
    assert [name for name in whole if _values(whole[name]) != _values(card[name])] == ["fgsm"]


def _values(found: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if key != "seconds"}


def test_skipped_measurements_are_repeated(monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as context:
        context.setitem(sys.modules, "pyautoattack", None)
        card = report_card(subject(effort=Effort(steps=2, restarts=1, queries=5)))
    for name in ("square", "autoattack"):
        assert card[name]["skipped"].startswith("needs the package pyautoattack: install dcnet with")
    assert {check.name for check in run_checks(card) if check.passed is None} == {"white box"}
    started: list[str] = []
    report_card(subject(), card, begins=started.append)
    assert started == ["smoothed_pgd", "transfer", "square", "autoattack"]


def test_autoattack_is_the_strongest_attack():
    effort = Effort(steps=6, restarts=1, queries=10, autoattack_queries=20)
    card = report_card(subject(linear((1.0, 2.0, 3.0, 0.5)).float(), 12, effort=effort, epsilon=0.02))
    least = min(card[name]["accuracy"] for name in ("fgsm", "bim", "pgd", "square"))
    assert card["autoattack"]["accuracy"] <= least
    assert card["autoattack"]["queries"] == 20
    # Attacks break no certified image, and some images of a linear network are certified.
    assert 0 < card["certified"]["certified"] <= card["autoattack"]["accuracy"]


def test_saturated_layers_are_attacked_with_smoothed_gradients():
    torch.manual_seed(7)
    layer = dcnet.DecoupledLinear(75, CLASSES, bias=False, operator="ball(radius=0.1)-cos")
    card = report_card(subject(nn.Sequential(nn.Flatten(), layer).eval()))
    assert card["smoothed_pgd"]["layers"] == 1
    assert "smoothed" in {check.name for check in run_checks(card)}
    assert "decoupled" not in layer.__dict__
    plain = report_card(subject())
    assert "skipped" in plain["smoothed_pgd"]
    assert "smoothed" not in {check.name for check in run_checks(plain)}


@pytest.mark.parametrize("name", ["clean", "surface", "pgd", "transfer", "square", "corrupted", "certified"])
def test_measurements_respect_the_batch_size(name: str, monkeypatch: pytest.MonkeyPatch):
    given, usual, sizes = subject(source=honest(seed=6), batch_size=7), nn.functional.linear, set()

    def noted(input: torch.Tensor, *rest: Any) -> torch.Tensor:
        sizes.add(len(input))
        return usual(input, *rest)

    monkeypatch.setattr(nn.functional, "linear", noted)
    measurements[name](given)
    assert max(sizes) == 7


def test_evaluate_attacks_matches_single_attacks():
    model, x, y = attacked(40)
    source, _, _ = attacked(1)
    with torch.no_grad():
        source.network[1].weight.mul_(-0.5)
    found = evaluate_attacks(model, x, y, source, epsilon=0.03, steps=7, step=0.01)
    bim = attacks.bim(model, x, y, epsilon=0.03, steps=7, step=0.01)
    assert found["clean"] == 1
    assert found["white_box"] == {
        "fgsm": accuracy(model, attacks.fgsm(model, x, y, epsilon=0.03), y),
        "bim": accuracy(model, bim, y),
    }
    made = attacks.bim(source, x, y, epsilon=0.03, steps=7, step=0.01, early_stop=False)
    assert found["black_box"]["bim"] == accuracy(model, made, y)
    assert found["white_box"]["bim"] < found["white_box"]["fgsm"] < 1
    assert found["black_box"]["fgsm"] > found["white_box"]["fgsm"]
    alone = evaluate_attacks(model, x, y, epsilon=0.03)
    assert (alone["black_box"], alone["steps"], alone["step"]) == (None, 10, pytest.approx(0.006))
    assert not torch.equal(made, x)
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x / 255, "from 0 to 255"),
        (lambda x: (x + 1) / 2, "from -1 to 1"),
        (lambda x: 0.06 * x + 0.4, "with mean 0 and deviation 1"),
    ],
)
def test_check_pixels_rejects_networks_for_another_range(change: Any, words: str):
    """The labels are correct for images of the other range."""

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = honest()

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return self.network(change(input))

    x = 0.3 + 0.2 * torch.rand(60, 3, 5, 5, generator=torch.Generator().manual_seed(3))
    moved = {"from 0 to 255": 255 * x, "from -1 to 1": 2 * x - 1}.get(words, (x - x.mean()) / x.std())
    with torch.no_grad():
        y = Other()(moved).argmax(1)
    with pytest.raises(ValueError, match=f"the network takes pixels {words}, not from 0 to 1"):
        check_pixels(Other(), x, y)
    with torch.no_grad():
        check_pixels(honest(), x, honest()(x).argmax(1))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epsilon": 0.0}, "epsilon must be above 0, not 0"),
        ({"epsilon": 8.0}, "epsilon must be a number from 0 to 1"),
        ({"source": linear((1.0, 2.0)).float()}, "the source must have as many classes as the network, 4"),
        ({"batch_size": 0}, "batch_size must be a whole number, 1 or more"),
    ],
)
def test_subject_rejects_invalid_arguments(options: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        subject(**options)
