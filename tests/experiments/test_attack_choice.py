"""Epsilon and steps are chosen by how near the plain network comes to the paper's."""

import pytest
import torch
from torch import nn

from dcnet.experiments import chosen
from dcnet.experiments.catalogue import attack_choice, attacks
from dcnet.robustness.report_card import evaluate_attacks


def numbers(fgsm, bim, other_fgsm, other_bim):
    return {"white_box": {"fgsm": fgsm, "bim": bim}, "black_box": {"fgsm": other_fgsm, "bim": other_bim}}


def test_the_distance_is_the_sum_over_the_four_numbers_of_the_paper():
    assert attack_choice.distance(numbers(0.1882, 0.0867, 0.5090, 0.3622)) == pytest.approx(0)
    assert attack_choice.distance(numbers(0.1782, 0.1067, 0.5390, 0.3222)) == pytest.approx(0.01 + 0.02 + 0.03 + 0.04)


def test_what_the_tables_have_is_among_what_is_tried():
    assert round(attacks.EPSILON * 255) in attack_choice.EPSILONS
    assert attacks.BIM_STEPS in attack_choice.STEPS
    (table,) = chosen(["attack_choice"])
    (source,) = table.cell("test error", "its source").configs(1)
    assert source == attacks.source_of(table.cells[0].configs(1)[0])


def test_every_choice_is_that_of_its_epsilon_and_steps(monkeypatch, tmp_path):
    torch.manual_seed(0)
    model, source = (nn.Sequential(nn.Flatten(), nn.Linear(16, 10)).eval() for _ in range(2))
    images, labels = torch.rand(200, 1, 4, 4), torch.randint(10, (200,))
    monkeypatch.setattr(attack_choice, "load_model", lambda run: (source, {}))
    monkeypatch.setattr(attacks, "images_to_attack", lambda *_: (images, labels))
    monkeypatch.setattr(attack_choice, "IMAGES", 100)
    record = {"config": attacks.config("baseline", "natural").described()}
    found = attack_choice.choices_of(model, record, tmp_path, None)
    wanted = evaluate_attacks(model, images[:100], labels[:100], source, epsilon=7 / 255, steps=3)
    assert found["7/255"]["3"] == {**wanted, "distance": attack_choice.distance(wanted)}
    (table,) = chosen(["attack_choice"])
    value = table.cell("7/255", "3 steps").value({"evaluations": {attack_choice.EVALUATION: found}})
    assert value == pytest.approx(100 * attack_choice.distance(wanted))
