"""AutoAttack and Square of the package pyautoattack."""

import logging
import sys

import pytest
import torch
from helpers.attacked_networks import CLASSES, PIXELS, attacked, images, linear, smooth
from pyautoattack import AutoAttack
from torch import nn

from dcnet.gradient_attack import norms
from dcnet.robustness import attacks
from dcnet.robustness.autoattack import PARTS, STANDARD


@pytest.mark.parametrize(("norm", "parts"), [("linf", STANDARD), ("l2", ("apgd-ce", "square"))])
def test_autoattack_matches_the_package(norm, parts):
    """With the same settings as dcnet; the package does not detect the number of classes."""
    model, x, y = attacked(4)
    model, x = model.float(), x.float()
    epsilon = {"linf": 0.02, "l2": 0.2}[norm]
    found = attacks.autoattack(model, x, y, epsilon=epsilon, norm=norm, queries=50, parts=parts, seed=3)
    theirs = AutoAttack(model, norm={"linf": "Linf", "l2": "L2"}[norm], eps=epsilon, seed=3)
    assert tuple(theirs.attacks_to_run) == STANDARD
    theirs.attacks_to_run = parts
    theirs.square.n_queries = 50
    theirs.fab.n_target_classes = theirs.apgd_targeted.n_target_classes = CLASSES - 1
    expected, _ = theirs.run_standard_evaluation(x, y)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert 0 < attacks.accuracy(model, found, y) < 1
    assert norms[norm].size(found - x).max() <= epsilon * (1 + 1e-5)


@pytest.mark.parametrize("part", sorted(PARTS))
@pytest.mark.parametrize("classes", [2, 3, 4, 12])
def test_each_part_runs_if_there_are_enough_classes(part, classes):
    model = (
        linear((1.0, 2.0, 3.0, 0.5) * 3).float() if classes == 12 else linear((1.0, 2.0, 3.0, 0.5)[:classes]).float()
    )
    x = images(3).float()
    with torch.no_grad():
        y = model(x).argmax(1)
    options = {"parts": (part,), "queries": 200}
    if PARTS[part] > classes:
        with pytest.raises(ValueError, match=f"none of the parts {part} works with {classes} classes: add fab-t"):
            attacks.autoattack(model, x, y, epsilon=0.9, **options)
    else:
        assert attacks.accuracy(model, attacks.autoattack(model, x, y, epsilon=0.9, **options), y) < 1


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_more_queries_make_square_stronger(norm):
    model, x, y = attacked(30)
    epsilon = {"linf": 0.1, "l2": 0.6}[norm]
    few, many = (
        attacks.accuracy(model, attacks.square(model, x, y, epsilon=epsilon, norm=norm, queries=queries), y)
        for queries in (1, 300)
    )
    white = attacks.accuracy(model, attacks.pgd(model, x, y, epsilon=epsilon, norm=norm, restarts=3), y)
    assert white <= many < few


def test_square_stays_within_its_number_of_queries():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.asked = 0

        def forward(self, input):
            self.asked += 1
            return torch.tensor([[2.0, 0.0, 0.0]]).repeat(len(input), 1)

    x, y = images(2), torch.zeros(2, dtype=torch.int64)
    asked = {}
    for name, options in {
        "square": {"queries": 30},
        "autoattack": {"queries": 30, "parts": ("square",)},
        "restarts": {"queries": 30, "restarts": 3},
    }.items():
        model = Constant()
        attacks.perturb(model, x, y, "autoattack" if name == "autoattack" else "square", epsilon=0.1, **options)
        asked[name] = model.asked
    # Plus a few calls that check the network.
    assert 30 < asked["square"] < 50
    assert 30 < asked["autoattack"] < 50
    assert 90 < asked["restarts"] < 110


def test_square_reaches_targets():
    model, x, y = attacked(10)
    targets = (y + 1) % CLASSES
    found = attacks.square(model, x, y, epsilon=0.5, targets=targets, queries=300)
    with torch.no_grad():
        assert (model(found).argmax(1) == targets).double().mean() > 0.5


def test_attacks_depend_on_the_seed_and_restore_the_process_state():
    model, x, y = attacked(8)
    state, tracing = torch.get_rng_state(), sys.gettrace()
    logger = logging.getLogger("auto-attack")
    handlers, propagate = list(logger.handlers), logger.propagate
    found = [attacks.square(model, x, y, epsilon=0.05, queries=10, seed=seed) for seed in (0, 1, 0)]
    attacks.autoattack(model, x, y, epsilon=0.05, parts=("apgd-ce",))
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])
    assert torch.equal(torch.get_rng_state(), state)
    assert sys.gettrace() is tracing
    assert (logger.handlers, logger.propagate) == (handlers, propagate)


def test_autoattack_restores_the_trace_function():
    def trace(frame, event, argument):
        return None

    model, x, y = attacked(2)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        attacks.autoattack(model, x, y, epsilon=0.01, parts=("apgd-ce",))
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)


def test_messages_of_the_package_become_warnings():
    class Steps(nn.Module):
        """Logits whose gradient is zero everywhere."""

        def __init__(self):
            super().__init__()
            self.network = smooth().float()

        def forward(self, input):
            return self.network(input.round() + 0 * input)

    model, x = Steps(), images(3).float()
    with torch.no_grad():
        y = model(x).argmax(1)
    with pytest.warns(UserWarning, match=r"AutoAttack says: there are \d points with zero gradient!.*attacks\.$"):
        attacks.autoattack(model, x, y, epsilon=0.01, parts=("apgd-dlr",))


def test_missing_package_raises_an_error_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyautoattack", None)
    model, x, y = attacked(2)
    for name in ("autoattack", "square"):
        with pytest.raises(ModuleNotFoundError, match=rf"{name} needs the package pyautoattack: .*dcnet\[robust"):
            getattr(attacks, name)(model, x, y, epsilon=0.1)
    attacks.pgd(model, x, y, epsilon=0.1)


@pytest.mark.parametrize("side", [*range(1, 27), 28, 32, 36])
def test_square_rejects_image_sizes_that_squares_do_not_fit_into(side):
    model = nn.Sequential(nn.Flatten(), nn.Linear(side * side, 3))
    x = torch.rand(2, 1, side, side)
    with torch.no_grad():
        y = model(x).argmax(1)
    attacks.square(model, x, y, epsilon=0.001, queries=2)
    if side < 5 or side in (12, 14, 18, 19, 24):
        with pytest.raises(ValueError, match=f"do not fit into {side} x {side} pixels with l2: use images of another"):
            attacks.square(model, x, y, epsilon=0.001, norm="l2", queries=2)
        with pytest.raises(ValueError, match=f"do not fit into {side} x {side} pixels"):
            attacks.autoattack(model, x, y, epsilon=0.001, norm="l2")
    else:
        attacks.square(model, x, y, epsilon=0.001, norm="l2", queries=2)


def test_square_requires_four_dimensions():
    model, x = nn.Linear(PIXELS, 3).double(), images(3).flatten(1)
    with pytest.raises(ValueError, match=r"square needs images \[N, C, H, W\], not \[3, 75\]"):
        attacks.square(model, x, torch.zeros(3, dtype=torch.int64), epsilon=0.1)
