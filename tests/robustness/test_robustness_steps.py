"""How the loop goes: what it leaves alone, how often it asks the network, and what it is compiled to."""

import pytest
import torch
from attacked_networks import CLASSES, SHAPE, answers, attacked, images, with_everything
from torch import nn

from dcnet.robustness import ascent, attacks, norms


class Counting(nn.Module):
    """A network that remembers how many images it was asked about, in which mode, and whether its weights were."""

    def __init__(self, network):
        super().__init__()
        self.network, self.asked, self.modes, self.wanted = network, [], set(), set()

    def forward(self, input):
        self.asked.append(len(input))
        self.modes.add(self.training)
        self.wanted.update(parameter.requires_grad for parameter in self.parameters())
        return self.network(input)


def test_images_that_are_broken_are_left_alone():
    model, x, y = attacked(40)
    wrong = y.clone()
    wrong[:15] = (y[:15] + 1) % CLASSES
    for name, options in (("bim", {}), ("pgd", {"restarts": 2}), ("pgd", {"norm": "l2"})):
        found = getattr(attacks, name)(model, x, wrong, epsilon=0.1, **options)
        assert torch.equal(found[:15], x[:15])
        moved = (found[15:] != x[15:]).flatten(1).any(1)
        assert moved.all()


def test_without_an_early_stop_all_images_are_moved_by_all_steps():
    model, x, y = attacked(20)
    wrong = (y + 1) % CLASSES
    for name in ("fgsm", "bim", "pgd"):
        options = {} if name == "fgsm" else {"early_stop": False}
        found = getattr(attacks, name)(model, x, wrong, epsilon=0.01, **options)
        assert (found != x).flatten(1).any(1).all()


@pytest.mark.parametrize("norm", sorted(norms))
def test_an_early_stop_breaks_no_fewer(norm):
    model, x, y = attacked(100)
    for epsilon in (0.01, 0.03):
        options = {"epsilon": epsilon * (1 if norm == "linf" else 4), "norm": norm, "steps": 6}
        stopped, whole = (attacks.pgd(model, x, y, early_stop=stop, **options) for stop in (True, False))
        left = [attacks.correct(model, found, y) for found in (stopped, whole)]
        assert not (left[0] & ~left[1]).any()
        assert 0 < left[0].sum() < 100


def test_early_stop_asks_less():
    model, x, y = attacked(64)
    counts = {}
    for stop in (True, False):
        counting = Counting(model)
        found = attacks.pgd(counting, x, y, epsilon=0.2, steps=30, early_stop=stop, batch_size=64)
        counts[stop] = sum(counting.asked)
        assert (counting.modes, counting.wanted) == ({False}, {False})
        assert attacks.accuracy(model, found, y) == 0
        assert 0 not in counting.asked
    # One image to see how many classes there are, and 30 steps of all.
    assert counts[False] == 1 + 30 * 64
    assert counts[True] < 0.4 * counts[False]


def test_fgsm_asks_once():
    model, x, y = attacked(10)
    counting = Counting(model)
    attacks.fgsm(counting, x, y, epsilon=0.1, batch_size=4)
    assert counting.asked == [1, 4, 4, 2]


@pytest.mark.parametrize("early_stop", [True, False])
def test_restarts_go_on_with_what_is_left(early_stop):
    model, x, y = attacked(64)
    counting = Counting(model)
    found = attacks.pgd(counting, x, y, epsilon=0.03, steps=3, restarts=10, early_stop=early_stop)
    left = int(attacks.correct(model, found, y).sum())
    assert 0 < left < 32
    assert counting.asked[-1] < 64


def test_once_all_are_broken_nothing_is_asked():
    model, x, y = attacked(16)
    counting = Counting(model)
    attacks.pgd(counting, x, (y + 1) % CLASSES, epsilon=0.1, steps=50, restarts=5)
    assert counting.asked == [1, 16]


def test_the_margin_moves_where_the_cross_entropy_has_no_gradient():
    class Sure(nn.Module):
        def forward(self, input):
            return 1e5 * torch.stack([input.mean((1, 2, 3)), 1 - input.mean((1, 2, 3))], 1)

    x = 0.9 * torch.ones(2, *SHAPE)
    y = torch.zeros(2, dtype=torch.int64)
    stuck, moved = (attacks.bim(Sure(), x, y, epsilon=0.6, loss=loss) for loss in ("ce", "margin"))
    assert torch.equal(stuck, x)
    assert attacks.accuracy(Sure(), moved, y) == 0


@pytest.mark.parametrize(("norm", "moved"), [("linf", 0.1), ("l2", 0.1 / 5)])
def test_a_gradient_that_is_nan_does_not_spoil_the_image(norm, moved):
    class Rooted(nn.Module):
        def forward(self, input):
            # 0 times an infinite slope.
            return torch.stack([(0 * input[:, 0]).sqrt().sum((1, 2)), -input[:, 1].mean((1, 2))], 1)

    x = 0.2 + 0.5 * images(3)
    found = attacks.bim(Rooted(), x, torch.zeros(3, dtype=torch.int64), epsilon=0.1, norm=norm, early_stop=False)
    assert torch.equal(found[:, 0], x[:, 0])
    torch.testing.assert_close(found[:, 1], x[:, 1] - moved)


def test_the_best_is_the_first_that_is_broken_and_else_the_highest():
    x = torch.zeros(4, 1)
    best = ascent.Best(x)
    every = torch.arange(4)
    best.take(every, x + 1, torch.tensor([1.0, 1.0, 1.0, torch.nan]), torch.tensor([False, False, True, False]))
    best.take(every, x + 2, torch.tensor([2.0, 0.5, 2.0, 0.0]), torch.tensor([False, True, True, False]))
    best.take(every[[3, 1, 0]], x[:3] + 3, torch.tensor([-1.0, 9.0, 1.5]), torch.tensor([False, False, False]))
    assert best.images.flatten().tolist() == [2, 2, 1, 2]
    assert best.score.tolist() == [2.0, 0.5, 1.0, 0.0]
    assert best.broken.tolist() == [False, True, True, False]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["fgsm", "pgd", "square"])
def test_whoever_calls_may_have_gradients_off(context, name):
    model, x, y = attacked(5)
    options = {"queries": 5} if name == "square" else {}
    expected = getattr(attacks, name)(model, x, y, epsilon=0.1, **options)
    with context():
        found = getattr(attacks, name)(model, x.clone(), y.clone(), epsilon=0.1, **options)
        assert attacks.accuracy(model, x.clone(), y.clone()) == 1
        assert attacks.curve(model, x.clone(), y.clone(), epsilons=[0.0, 0.1])[0] == 1
    assert torch.equal(found, expected)


def test_a_generator_gives_other_images_each_time():
    model, x, y = attacked(5)
    options = {"epsilon": 0.02, "steps": 2, "early_stop": False}
    generator = torch.Generator().manual_seed(1)
    first, second = (attacks.pgd(model, x, y, seed=generator, **options) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(attacks.pgd(model, x, y, seed=torch.Generator().manual_seed(1), **options), first)


def test_compiled_steps_find_the_same(monkeypatch):
    """By the tracing of torch.compile, whose code generation takes longer than all tests here."""
    torch.compiler.reset()
    compiled, compile_ = [], torch.compile

    def traced(function):
        compiled.append(function)
        return compile_(function, backend="aot_eager", fullgraph=True)

    monkeypatch.setattr("torch.compile", traced)
    ascent._compiled_move.cache_clear()
    model, x = with_everything().double().eval(), images(24)
    y = answers(model, x)
    for epsilon in (0.05, 0.1):
        options = {"epsilon": epsilon, "norm": "l2", "steps": 3, "momentum": 0.5, "batch_size": 12}
        expected = attacks.pgd(model, x, y, **options)
        found = attacks.pgd(model, x, y, compile=True, **options)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    ascent._compiled_move.cache_clear()
    assert model in compiled
    assert ascent._move in compiled


def test_everything_is_on_the_device_of_the_images(device):
    model, x = with_everything().to(device), torch.rand(5, *SHAPE)
    y = answers(model.eval(), x.to(device)).cpu()
    found = {
        where: attacks.pgd(model, x.to(where), y.to(where), epsilon=0.1, steps=3, early_stop=False)
        for where in {"cpu", device}
    }
    for where, image in found.items():
        assert image.device.type == where
        torch.testing.assert_close(image.cpu(), found["cpu"], rtol=0, atol=1e-6)
