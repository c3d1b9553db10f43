"""Accuracy against epsilon, and attacks that know another network than the one they are shown to."""

import dataclasses

import pytest
import torch
from attacked_networks import CLASSES, answers, attacked, images, smooth
from torch import nn

from dcnet.robustness import accuracy, attacks, correct
from dcnet.robustness.draws import as_seed

EPSILONS = [0.05, 0.0, 0.01, 0.05, 0.02]


def another(seed=9):
    """A network near the other one: what misleads it often misleads the other, too."""
    model = smooth()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * parameter.std() * torch.randn_like(parameter))
    return model


def test_a_curve_of_fgsm_is_its_accuracy_at_each_epsilon():
    model, x, y = attacked(60)
    found = attacks.curve(model, x, y, attack="fgsm", epsilons=EPSILONS, batch_size=7)
    expected = [accuracy(model, attacks.fgsm(model, x, y, epsilon=epsilon), y) for epsilon in EPSILONS]
    assert found == expected
    assert found[1] == 1 > found[2] > found[0]


class Shy(nn.Module):
    """Wrong about a pixel between 0.55 and 0.65 alone."""

    def forward(self, input):
        pixel = input[:, 0, 0, 0]
        return torch.stack([torch.zeros_like(pixel), 10 * (pixel - 0.55) * (0.65 - pixel)], 1)


class Rising(nn.Module):
    """Never wrong, and the less sure the brighter it gets."""

    def forward(self, input):
        pixel = input[:, 0, 0, 0]
        return torch.stack([torch.full_like(pixel, 2.0), pixel], 1)


def test_a_curve_of_a_search_keeps_what_was_found_at_a_smaller_epsilon():
    """Seen by an attack that works at one epsilon alone."""
    x = torch.full((2, 1, 1, 1), 0.5, dtype=torch.float64)
    y = torch.zeros(2, dtype=torch.int64)
    options = {"steps": 1, "step": 0.5, "random_start": False}
    epsilons = [0.02, 0.1, 0.4]
    alone = [accuracy(Shy(), attacks.pgd(Shy(), x, y, epsilon=epsilon, **options), y) for epsilon in epsilons]
    assert alone == [1, 0, 1]
    assert attacks.curve(Shy(), x, y, attack="pgd", epsilons=epsilons, **options) == [1, 0, 0]
    assert attacks.curve(Shy(), x, y, attack="pgd", epsilons=epsilons, early_stop=False, **options) == [1, 0, 1]
    # Whoever knows the source alone does not know which of the images to keep.
    assert attacks.curve(Shy(), x, y, attack="bim", epsilons=epsilons, source=Rising()) == [1, 0, 1]


def test_points_are_told_as_they_are_known():
    model, x, y = attacked(20)
    told = []
    found = attacks.curve(model, x, y, epsilons=EPSILONS, steps=3, each=lambda *point: told.append(point))
    assert [epsilon for epsilon, _ in told] == sorted(set(EPSILONS))
    assert [dict(told)[epsilon] for epsilon in EPSILONS] == found


def test_a_generator_is_one_seed_for_all_epsilons():
    seeds = []

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Listening(attacks.Attack):
        name = "listening"
        about = "hears the seed"

        def images(self, task):
            seeds.append(task.seed)
            return task.x

    model, x, y = attacked(3)
    attacks.curve(model, x, y, attack=Listening(), epsilons=[0.1, 0.2], seed=torch.Generator().manual_seed(1))
    assert seeds == [as_seed(torch.Generator().manual_seed(1))] * 2


def test_a_curve_of_targets():
    model, x, y = attacked(30)
    targets = (y + 2) % CLASSES
    found = attacks.curve(model, x, y, epsilons=[0.0, 0.03], targets=targets, steps=5)
    expected = accuracy(model, attacks.pgd(model, x, y, epsilon=0.03, targets=targets, steps=5), y)
    assert found == [1, expected]
    assert expected < 1


def test_images_made_with_another_network():
    """They are those that are made for the other network, each as far away as it may be."""
    model, x, y = attacked(60)
    source = another()
    own = answers(source, x) == y
    found = attacks.pgd(model, x, y, epsilon=0.1, source=source)
    assert torch.equal(found, attacks.pgd(source, x, y, epsilon=0.1, early_stop=False))
    stopped = attacks.pgd(source, x, y, epsilon=0.1)
    assert ((found - x).abs().flatten(1).mean(1) > (stopped - x).abs().flatten(1).mean(1)).all()
    broken = [1 - accuracy(model, made, y) for made in (attacks.pgd(model, x, y, epsilon=0.1), found, stopped)]
    # The network itself is the better target, and an image that only just breaks the source the worse one.
    assert broken[0] > broken[1] > broken[2]
    assert own.double().mean() > 0.5


@pytest.mark.parametrize("attack", ["fgsm", "bim", "square"])
def test_a_curve_with_a_source(attack):
    model, x, y = attacked(40)
    source, options = another(), {"queries": 20} if attack == "square" else {}
    found = attacks.curve(model, x, y, attack=attack, epsilons=[0.02, 0.1], source=source, **options)
    for epsilon, reached in zip([0.02, 0.1], found, strict=True):
        made = attacks.perturb(model, x, y, attack, epsilon=epsilon, source=source, **options)
        assert accuracy(model, made, y) == reached


def test_accuracy_counts_what_is_right():
    model, x, y = attacked(10)
    y[:3] = (y[:3] + 1) % CLASSES
    assert correct(model, x, y, batch_size=4).tolist() == [False] * 3 + [True] * 7
    assert accuracy(model, x, y) == 0.7


def test_logits_that_are_nan_are_not_right():
    class Broken(nn.Module):
        def forward(self, input):
            logits = torch.zeros(len(input), 2)
            logits[:, 0] = torch.where(input[:, 0, 0, 0] > 0.5, torch.nan, 1.0)
            return logits

    x = images(6)
    dark = (x[:, 0, 0, 0] <= 0.5).tolist()
    assert True in dark
    assert False in dark
    assert correct(Broken(), x, torch.zeros(6, dtype=torch.int64)).tolist() == dark
