"""Attacks by gradient against plain loops, in float64."""

import pytest
import torch
from attacked_networks import CLASSES, PIXELS, answers, attacked
from attacks_in_loops import LoopAttack, cross_entropy, draw, margin

from dcnet.data.order import mixed
from dcnet.robustness import attacks, norms

BUDGETS = [("linf", 0.06), ("l2", 0.3)]
CLOSE = {"rtol": 0, "atol": 1e-6}


@pytest.mark.parametrize(("norm", "epsilon"), BUDGETS)
def test_fgsm_is_one_step_as_far_as_epsilon(norm, epsilon):
    model, x, y = attacked(5)
    expected = LoopAttack(model, norm, epsilon, epsilon, 1).images(x, y)
    found = attacks.fgsm(model, x, y, epsilon=epsilon, norm=norm)
    torch.testing.assert_close(found, expected, **CLOSE)
    assert not torch.equal(found, x)


@pytest.mark.parametrize(("norm", "epsilon"), BUDGETS)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_bim_with_and_without_momentum(norm, epsilon, momentum):
    model, x, y = attacked(3)
    expected = LoopAttack(model, norm, epsilon, 0.4 * epsilon, 5, momentum).images(x, y)
    found = attacks.bim(model, x, y, epsilon=epsilon, norm=norm, steps=5, momentum=momentum, early_stop=False)
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize(("norm", "epsilon"), BUDGETS)
@pytest.mark.parametrize("loss", [cross_entropy, margin])
def test_targeted_attacks_go_towards_the_target(norm, epsilon, loss):
    model, x, y = attacked(3)
    targets = (y + 1) % CLASSES
    expected = LoopAttack(model, norm, epsilon, 0.1, 4, loss=loss, targeted=True).images(x, targets)
    name = "ce" if loss is cross_entropy else "margin"
    options = {"norm": norm, "steps": 4, "step": 0.1, "loss": name, "early_stop": False}
    found = attacks.bim(model, x, y, epsilon=epsilon, targets=targets, **options)
    torch.testing.assert_close(found, expected, **CLOSE)
    farther = attacks.pgd(model, x, y, epsilon=norms[norm].largest(PIXELS), targets=targets, norm=norm, restarts=3)
    assert torch.equal(answers(model, farther), targets)


def test_pgd_begins_where_its_seed_says():
    model, x, y = attacked(4)
    noise = [[2 * draw(mixed(7, 0), row, pixel, PIXELS) - 1 for pixel in range(PIXELS)] for row in range(4)]
    starts = (x + 0.06 * torch.tensor(noise, dtype=torch.float64).view_as(x)).clamp(0, 1)
    expected = LoopAttack(model, "linf", 0.06, 0.02, 3).images(x, y, starts)
    found = attacks.pgd(model, x, y, epsilon=0.06, steps=3, step=0.02, seed=7, early_stop=False)
    torch.testing.assert_close(found, expected, **CLOSE)


def test_pgd_begins_within_the_ball_of_l2():
    """One step of no length worth mentioning leaves the start as it is."""
    model, x, y = attacked(200)
    x = 0.5 + 0.001 * x
    found = attacks.pgd(model, x, y, epsilon=0.3, norm="l2", steps=1, step=1e-12, early_stop=False) - x
    sizes = found.flatten(1).norm(dim=1) / 0.3
    # Of a ball of 75 dimensions half lies beyond 0.991 of the radius.
    assert sizes.max() <= 1
    assert sizes.median() == pytest.approx(0.5 ** (1 / PIXELS), abs=0.003)
    assert found.mean().abs() < 0.002


@pytest.mark.parametrize("name", ["bim", "pgd"])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_the_default_step_is_a_share_of_epsilon(name, norm):
    model, x, y = attacked(3)
    reach = {"bim": 2.0, "pgd": 2.5}[name]
    options = {"norm": norm, "early_stop": False, "steps": 8}
    found, given = (
        getattr(attacks, name)(model, x, y, epsilon=0.2, **options, **step) for step in ({}, {"step": reach * 0.2 / 8})
    )
    assert torch.equal(found, given)


def test_restarts_take_the_first_that_breaks_and_else_the_highest_loss():
    model, x, y = attacked(30)
    single = {"epsilon": 0.02, "steps": 3, "early_stop": False}
    runs = []
    for restart in range(4):
        noise = norms["linf"].scattered(x, torch.arange(30), mixed(0, restart))
        start = (x + 0.02 * noise).clamp(0, 1)
        runs.append(LoopAttack(model, "linf", 0.02, 2.5 * 0.02 / 3, 3).images(x[:8], y[:8], start[:8]))
    found = attacks.pgd(model, x, y, restarts=4, **single)[:8]
    for at in range(8):
        losses = [cross_entropy(model(run[at : at + 1])[0].tolist(), int(y[at])) for run in runs]
        broken = [int(answers(model, run[at : at + 1])) != int(y[at]) for run in runs]
        chosen = broken.index(True) if any(broken) else losses.index(max(losses))
        torch.testing.assert_close(found[at], runs[chosen][at], **CLOSE)
    first = attacks.pgd(model, x, y, **single)
    assert attacks.accuracy(model, attacks.pgd(model, x, y, restarts=4, **single), y) <= attacks.accuracy(
        model, first, y
    )
