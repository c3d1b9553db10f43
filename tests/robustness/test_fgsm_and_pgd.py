"""FGSM, BIM and PGD against plain loops and foolbox, their steps, and networks that return NaN."""

import pytest
import torch
from helpers.attacked_networks import CLASSES, PIXELS, SHAPE, answers, attacked, images, with_everything
from helpers.attacks_in_loops import LoopAttack, cross_entropy, draw, margin
from torch import Tensor, nn

from dcnet import gradient_attack
from dcnet.data.batches import hash_seed
from dcnet.gradient_attack import LOSSES, Goal, norms
from dcnet.robustness import accuracy, attacks, correct
from dcnet.robustness.masked_gradients import gradients
from dcnet.robustness.subject import Subject

BUDGETS = [("linf", 0.06), ("l2", 0.3)]
CLOSE = {"rtol": 0, "atol": 1e-6}


@pytest.mark.parametrize(("norm", "epsilon"), BUDGETS)
def test_fgsm_is_one_step_of_length_epsilon(norm, epsilon):
    model, x, y = attacked(5)
    expected = LoopAttack(model, norm, epsilon, epsilon, 1).images(x, y)
    found = attacks.fgsm(model, x, y, epsilon=epsilon, norm=norm)
    torch.testing.assert_close(found, expected, **CLOSE)
    assert not torch.equal(found, x)


@pytest.mark.parametrize(("norm", "epsilon"), BUDGETS)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_bim_matches_plain_loops_with_and_without_momentum(norm, epsilon, momentum):
    model, x, y = attacked(3)
    expected = LoopAttack(model, norm, epsilon, 0.4 * epsilon, 5, momentum).images(x, y)
    found = attacks.bim(model, x, y, epsilon=epsilon, norm=norm, steps=5, momentum=momentum, early_stop=False)
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize(("norm", "epsilon"), BUDGETS)
@pytest.mark.parametrize("loss", [cross_entropy, margin])
def test_targeted_attacks_match_plain_loops_and_reach_targets(norm, epsilon, loss):
    model, x, y = attacked(3)
    targets = (y + 1) % CLASSES
    expected = LoopAttack(model, norm, epsilon, 0.1, 4, loss=loss, targeted=True).images(x, targets)
    name = "ce" if loss is cross_entropy else "margin"
    options = {"norm": norm, "steps": 4, "step": 0.1, "loss": name, "early_stop": False}
    found = attacks.bim(model, x, y, epsilon=epsilon, targets=targets, **options)
    torch.testing.assert_close(found, expected, **CLOSE)
    farther = attacks.pgd(model, x, y, epsilon=norms[norm].max_size(PIXELS), targets=targets, norm=norm, restarts=3)
    assert torch.equal(answers(model, farther), targets)


def test_random_start_of_pgd_depends_on_the_seed():
    model, x, y = attacked(4)
    noise = [[2 * draw(hash_seed(7, 0), row, pixel, PIXELS) - 1 for pixel in range(PIXELS)] for row in range(4)]
    starts = (x + 0.06 * torch.tensor(noise, dtype=torch.float64).view_as(x)).clamp(0, 1)
    expected = LoopAttack(model, "linf", 0.06, 0.02, 3).images(x, y, starts)
    found = attacks.pgd(model, x, y, epsilon=0.06, steps=3, step=0.02, seed=7, early_stop=False)
    torch.testing.assert_close(found, expected, **CLOSE)


def test_random_start_of_pgd_is_uniform_in_the_l2_ball():
    """A step of length 1e-12 shows the start."""
    model, x, y = attacked(200)
    x = 0.5 + 0.001 * x
    found = attacks.pgd(model, x, y, epsilon=0.3, norm="l2", steps=1, step=1e-12, early_stop=False) - x
    sizes = found.flatten(1).norm(dim=1) / 0.3
    # Half of the volume of a ball of 75 dimensions is beyond 0.991 of its radius.
    assert sizes.max() <= 1
    assert sizes.median() == pytest.approx(0.5 ** (1 / PIXELS), abs=0.003)
    assert found.mean().abs() < 0.002


@pytest.mark.parametrize("name", ["bim", "pgd"])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_default_step_is_proportional_to_epsilon(name, norm):
    model, x, y = attacked(3)
    reach = {"bim": 2.0, "pgd": 2.5}[name]
    options = {"norm": norm, "early_stop": False, "steps": 8}
    found, given = (
        getattr(attacks, name)(model, x, y, epsilon=0.2, **options, **step) for step in ({}, {"step": reach * 0.2 / 8})
    )
    assert torch.equal(found, given)


def test_restarts_keep_the_first_success_or_the_highest_loss():
    model, x, y = attacked(30)
    single = {"epsilon": 0.02, "steps": 3, "early_stop": False}
    runs = []
    for restart in range(4):
        noise = norms["linf"].sample_ball(x, torch.arange(30), hash_seed(0, restart))
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


class Counting(nn.Module):
    """Records the batch sizes, the mode, and whether weights require a gradient."""

    def __init__(self, network):
        super().__init__()
        self.network, self.batches, self.modes, self.wanted = network, [], set(), set()

    def forward(self, input):
        self.batches.append(len(input))
        self.modes.add(self.training)
        self.wanted.update(parameter.requires_grad for parameter in self.parameters())
        return self.network(input)


def test_misclassified_images_stay_unchanged():
    model, x, y = attacked(40)
    wrong = y.clone()
    wrong[:15] = (y[:15] + 1) % CLASSES
    for name, options in (("bim", {}), ("pgd", {"restarts": 2}), ("pgd", {"norm": "l2"})):
        found = getattr(attacks, name)(model, x, wrong, epsilon=0.1, **options)
        assert torch.equal(found[:15], x[:15])
        moved = (found[15:] != x[15:]).flatten(1).any(1)
        assert moved.all()


def test_all_images_move_without_early_stop():
    model, x, y = attacked(20)
    wrong = (y + 1) % CLASSES
    for name in ("fgsm", "bim", "pgd"):
        options = {} if name == "fgsm" else {"early_stop": False}
        found = getattr(attacks, name)(model, x, wrong, epsilon=0.01, **options)
        assert (found != x).flatten(1).any(1).all()


@pytest.mark.parametrize("norm", sorted(norms))
def test_early_stop_does_not_weaken_pgd(norm):
    model, x, y = attacked(100)
    for epsilon in (0.01, 0.03):
        options = {"epsilon": epsilon * (1 if norm == "linf" else 4), "norm": norm, "steps": 6}
        stopped, whole = (attacks.pgd(model, x, y, early_stop=stop, **options) for stop in (True, False))
        left = [attacks.correct(model, found, y) for found in (stopped, whole)]
        assert not (left[0] & ~left[1]).any()
        assert 0 < left[0].sum() < 100


def test_early_stop_saves_forward_passes():
    model, x, y = attacked(64)
    counts = {}
    for stop in (True, False):
        counting = Counting(model)
        found = attacks.pgd(counting, x, y, epsilon=0.2, steps=30, early_stop=stop, batch_size=64)
        counts[stop] = sum(counting.batches)
        assert (counting.modes, counting.wanted) == ({False}, {False})
        assert attacks.accuracy(model, found, y) == 0
        assert 0 not in counting.batches
    # One image for the number of classes, and 30 steps of all images.
    assert counts[False] == 1 + 30 * 64
    assert counts[True] < 0.4 * counts[False]


def test_fgsm_calls_the_network_once_per_batch():
    model, x, y = attacked(10)
    counting = Counting(model)
    attacks.fgsm(counting, x, y, epsilon=0.1, batch_size=4)
    assert counting.batches == [1, 4, 4, 2]


@pytest.mark.parametrize("early_stop", [True, False])
def test_restarts_continue_with_correct_images(early_stop):
    model, x, y = attacked(64)
    counting = Counting(model)
    found = attacks.pgd(counting, x, y, epsilon=0.03, steps=3, restarts=10, early_stop=early_stop)
    left = int(attacks.correct(model, found, y).sum())
    assert 0 < left < 32
    assert counting.batches[-1] < 64


def test_pgd_stops_when_all_images_are_misclassified():
    model, x, y = attacked(16)
    counting = Counting(model)
    attacks.pgd(counting, x, (y + 1) % CLASSES, epsilon=0.1, steps=50, restarts=5)
    assert counting.batches == [1, 16]


def test_margin_loss_has_a_gradient_where_the_softmax_saturates():
    class Sure(nn.Module):
        def forward(self, input):
            return 1e5 * torch.stack([input.mean((1, 2, 3)), 1 - input.mean((1, 2, 3))], 1)

    x = 0.9 * torch.ones(2, *SHAPE)
    y = torch.zeros(2, dtype=torch.int64)
    stuck, moved = (attacks.bim(Sure(), x, y, epsilon=0.6, loss=loss) for loss in ("ce", "margin"))
    assert torch.equal(stuck, x)
    assert attacks.accuracy(Sure(), moved, y) == 0


@pytest.mark.parametrize(("norm", "moved"), [("linf", 0.1), ("l2", 0.1 / 5)])
def test_nan_gradients_leave_other_pixels_intact(norm, moved):
    class Rooted(nn.Module):
        def forward(self, input):
            # 0 times an infinite slope.
            return torch.stack([(0 * input[:, 0]).sqrt().sum((1, 2)), -input[:, 1].mean((1, 2))], 1)

    x = 0.2 + 0.5 * images(3)
    found = attacks.bim(Rooted(), x, torch.zeros(3, dtype=torch.int64), epsilon=0.1, norm=norm, early_stop=False)
    assert torch.equal(found[:, 0], x[:, 0])
    torch.testing.assert_close(found[:, 1], x[:, 1] - moved)


def test_best_keeps_the_first_success_or_the_highest_score():
    x = torch.zeros(4, 1)
    best = gradient_attack.Best(x)
    every = torch.arange(4)
    best.update(every, x + 1, torch.tensor([1.0, 1.0, 1.0, torch.nan]), torch.tensor([False, False, True, False]))
    best.update(every, x + 2, torch.tensor([2.0, 0.5, 2.0, 0.0]), torch.tensor([False, True, True, False]))
    best.update(every[[3, 1, 0]], x[:3] + 3, torch.tensor([-1.0, 9.0, 1.5]), torch.tensor([False, False, False]))
    assert best.images.flatten().tolist() == [2, 2, 1, 2]
    assert best.score.tolist() == [2.0, 0.5, 1.0, 0.0]
    assert best.broken.tolist() == [False, True, True, False]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["fgsm", "pgd", "square"])
def test_attacks_work_in_no_grad_and_inference_mode(context, name):
    model, x, y = attacked(5)
    options = {"queries": 5} if name == "square" else {}
    expected = getattr(attacks, name)(model, x, y, epsilon=0.1, **options)
    with context():
        found = getattr(attacks, name)(model, x.clone(), y.clone(), epsilon=0.1, **options)
        assert attacks.accuracy(model, x.clone(), y.clone()) == 1
        assert attacks.curve(model, x.clone(), y.clone(), epsilons=[0.0, 0.1])[0] == 1
    assert torch.equal(found, expected)


def test_each_call_with_a_generator_gives_other_images():
    model, x, y = attacked(5)
    options = {"epsilon": 0.02, "steps": 2, "early_stop": False}
    generator = torch.Generator().manual_seed(1)
    first, second = (attacks.pgd(model, x, y, seed=generator, **options) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(attacks.pgd(model, x, y, seed=torch.Generator().manual_seed(1), **options), first)


def test_compiled_steps_give_the_same_images(monkeypatch):
    """With an eager backend, since code generation takes longer than all other tests here."""
    torch.compiler.reset()
    compiled, compile_ = [], torch.compile

    def traced(function):
        compiled.append(function)
        return compile_(function, backend="aot_eager", fullgraph=True)

    monkeypatch.setattr("torch.compile", traced)
    gradient_attack._compiled_move.cache_clear()
    model, x = with_everything().double().eval(), images(24)
    y = answers(model, x)
    for epsilon in (0.05, 0.1):
        options = {"epsilon": epsilon, "norm": "l2", "steps": 3, "momentum": 0.5, "batch_size": 12}
        expected = attacks.pgd(model, x, y, **options)
        found = attacks.pgd(model, x, y, compile=True, **options)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    gradient_attack._compiled_move.cache_clear()
    assert model in compiled
    assert gradient_attack._move in compiled


def test_results_are_on_the_device_of_the_images(device):
    model, x = with_everything().to(device), torch.rand(5, *SHAPE)
    y = answers(model.eval(), x.to(device)).cpu()
    found = {
        where: attacks.pgd(model, x.to(where), y.to(where), epsilon=0.1, steps=3, early_stop=False)
        for where in {"cpu", device}
    }
    for where, image in found.items():
        assert image.device.type == where
        torch.testing.assert_close(image.cpu(), found["cpu"], rtol=0, atol=1e-6)


# Both compute in float64, and differ only in the order of sums.
SAME_ORDER = {"rtol": 0, "atol": 1e-9}
NORMS = {"linf": "Linf", "l2": "L2"}


def foolbox_images(kind, norm, model, x, y, epsilon, targets=None, **options):
    # Its import warns.
    import foolbox

    attack = getattr(foolbox.attacks, f"{NORMS[norm]}{kind}")(**options)
    criterion = foolbox.criteria.Misclassification(y)
    if targets is not None:
        criterion = foolbox.criteria.TargetedMisclassification(targets)
    _, found, broken = attack(foolbox.PyTorchModel(model, bounds=(0, 1)), x, criterion, epsilons=epsilon)
    return found, broken


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("norm", "epsilon"), [("linf", 8 / 255), ("l2", 0.5)])
def test_fgsm_matches_foolbox(norm, epsilon):
    model, x, y = attacked(50)
    expected, broken = foolbox_images("FastGradientAttack", norm, model, x, y, epsilon)
    found = attacks.fgsm(model, x, y, epsilon=epsilon, norm=norm)
    torch.testing.assert_close(found, expected, **SAME_ORDER)
    assert torch.equal(attacks.correct(model, found, y), ~broken)
    assert 0 < broken.double().mean() < 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("norm", "epsilon"), [("linf", 4 / 255), ("l2", 0.2)])
@pytest.mark.parametrize("targeted", [False, True])
def test_bim_matches_foolbox(norm, epsilon, targeted):
    model, x, y = attacked(50)
    targets = (y + 1) % CLASSES if targeted else None
    expected, _ = foolbox_images("BasicIterativeAttack", norm, model, x, y, epsilon, targets)
    found = attacks.bim(model, x, y, epsilon=epsilon, norm=norm, targets=targets, early_stop=False)
    torch.testing.assert_close(found, expected, **SAME_ORDER)
    assert 0 < attacks.accuracy(model, found, y) < 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("norm", "epsilon"), [("linf", 4 / 255), ("l2", 0.2)])
def test_pgd_matches_foolbox(norm, epsilon):
    """Random starts differ, so accuracies are compared: they differ by at most 3 of 200 images."""
    model, x, y = attacked(200)
    torch.manual_seed(0)
    options = {"steps": 20, "rel_stepsize": 0.125}
    _, broken = foolbox_images("ProjectedGradientDescentAttack", norm, model, x, y, epsilon, **options)
    found = attacks.pgd(model, x, y, epsilon=epsilon, norm=norm, steps=20, early_stop=False)
    assert attacks.accuracy(model, found, y) == pytest.approx(1 - broken.double().mean().item(), abs=0.0151)
    assert 0.05 < broken.double().mean() < 0.95


class NanBeyond(nn.Module):
    """Returns NaN logits for images farther than a limit from x; for all images with a negative limit."""

    def __init__(self, network: nn.Module, x: Tensor, limit: float):
        super().__init__()
        self.network, self.limit = network, limit
        self.register_buffer("x", x)

    def forward(self, input: Tensor) -> Tensor:
        far = (input[:, None] - self.x[None]).flatten(2).abs().amax(2).amin(1) > self.limit
        # Only at the predicted class, which argmax would still return.
        logits = self.network(input)
        first = torch.arange(logits.shape[1]) == logits.argmax(1, keepdim=True)
        return torch.where(first & far[:, None], torch.nan, logits)


@pytest.mark.parametrize(
    ("name", "settings"), [("bim", {}), ("pgd", {}), ("pgd", {"early_stop": False, "restarts": 2})]
)
def test_attacks_keep_images_with_nan_logits(name, settings):
    network, x, y = attacked(6)
    model = NanBeyond(network, x, 0.0004)
    assert correct(model, x, y).all()
    # Too small an epsilon to reach another class.
    assert accuracy(network, attacks.pgd(network, x, y, epsilon=0.0005), y) == 1
    found = getattr(attacks, name)(model, x, y, epsilon=0.0005, **settings)
    assert not correct(model, found, y).any()


@pytest.mark.parametrize("loss", ["ce", "margin"])
def test_nan_logits_succeed_only_in_untargeted_attacks(loss):
    network, x, y = attacked(4)
    model = NanBeyond(network, x, -1.0)
    for targeted in (False, True):
        score, there = Goal(model, LOSSES[loss], targeted).evaluate(x, y)
        assert there.tolist() == [not targeted] * 4
        assert score.isnan().any()
    # Finite logits are unaffected.
    assert Goal(network, LOSSES[loss], True).evaluate(x, y)[1].all()
    assert not Goal(network, LOSSES[loss]).evaluate(x, y)[1].any()


def test_targeted_attack_does_not_stop_at_nan():
    network, x, y = attacked(6)
    targets = (y + 1) % CLASSES
    model = NanBeyond(network, x, 2.0)
    found = attacks.pgd(model, x, y, epsilon=1.0, targets=targets)
    assert torch.equal(model(found).argmax(1), targets)
    broken = NanBeyond(network, x, -1.0)
    assert not Goal(broken, LOSSES["ce"], True).evaluate(found, targets)[1].any()


def test_gradients_count_only_correct_images():
    network, x, y = attacked(6)
    model = NanBeyond(network, torch.cat([x[:4], images(1, seed=8)]), 1e-9)
    assert gradients(Subject(model, x, y))["images"] == 4 == int(correct(model, x, y).sum())
