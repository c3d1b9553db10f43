"""Annealing of margins: shares, schedules, precision and gradients."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from helpers.heads_and_batches import head_and_batch
from torch import nn

from dcnet.losses import Annealing, ASoftmax, Automatic, Margin, MarginSoftmax, SphereFace2, SphereFaceR, registry
from dcnet.losses.annealing import AnyAnnealing, apply_share

HALVES = Annealing(start=3, rate=1, floor=1)
TENTH = Annealing(start=9, rate=0, floor=0)


def at_angle(head: MarginSoftmax, degrees: float) -> tuple[torch.Tensor, torch.Tensor]:
    """One feature at an angle to the first of two classes, which are orthogonal."""
    with torch.no_grad():
        head.weight.copy_(torch.eye(2))
    theta = math.radians(degrees)
    return torch.tensor([[math.cos(theta), math.sin(theta)]]), torch.tensor([0])


# --- batches without angles ---


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_batch_that_is_not_finite_keeps_the_share(value: float):
    head = MarginSoftmax(2, 2, ASoftmax(m=4), annealing=Automatic(pace=0.5))
    feature, label = at_angle(head, 60)
    head(feature, label)
    before = head.eased_in.item()
    assert before > 0
    head(torch.tensor([[value, 1.0], [1.0, 0.0]]), torch.tensor([0, 0]))
    assert head.eased_in.item() == before
    head(feature, label)
    assert head.eased_in.item() > before


def test_an_empty_batch_keeps_the_share():
    head = MarginSoftmax(2, 2, annealing="auto")
    head(*at_angle(head, 60))
    before = head.eased_in.item()
    head(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64))
    assert head.eased_in.item() == before > 0


# --- consecutive batches ---


def test_evaluation_takes_the_share_that_training_takes_next():
    head, x, labels = head_and_batch(ASoftmax(m=4), annealing=HALVES)
    for _ in range(3):
        evaluated = head.eval()(x, labels).item()
        assert evaluated == head.train()(x, labels).item()


@pytest.mark.parametrize("annealing", [HALVES, Automatic(pace=0.5)], ids=str)
def test_gradients_of_two_batches_at_once(annealing: AnyAnnealing):
    """The second batch changes the share before the gradients of the first are computed."""
    apart, x, labels = head_and_batch(ASoftmax(m=4), annealing=annealing)
    apart = apart.float()
    x = x.float().requires_grad_()
    at_once = copy.deepcopy(apart)
    one = [torch.autograd.grad(apart(x, labels), x)[0] for _ in range(2)]
    torch.testing.assert_close(torch.autograd.grad(at_once(x, labels) + at_once(x, labels), x)[0], sum(one))


def test_the_share_moves_with_the_head_when_it_is_cast():
    head = MarginSoftmax(2, 2, annealing="auto").to(device="meta", dtype=torch.float16)
    assert (head.eased_in.device.type, head.eased_in.dtype) == ("meta", torch.float32)


# --- the other classes ---


@pytest.mark.parametrize("margin", [SphereFaceR(version=2), SphereFaceR(m=2.5, version=2, detach=False)], ids=str)
def test_a_margin_on_the_others_is_annealed(margin: Margin):
    head, x, labels = head_and_batch(margin, annealing=HALVES)
    cos = head.cosines(x)
    for step in range(4):
        share = 1 / (1 + max(1.0, 3 / (1 + step)))
        logits = 30 * (cos + share * (margin.others(cos) - cos))
        own = 30 * cos.gather(1, labels[:, None])
        expected = F.cross_entropy(logits.scatter(1, labels[:, None], own), labels)
        assert head(x, labels).item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_binary_margin_is_annealed():
    margin = SphereFace2()
    head, x, labels = head_and_batch(margin, annealing=HALVES)
    cos, own = head.cosines(x), F.one_hot(labels, 4).bool()
    for step in range(3):
        share = 1 / (1 + max(1.0, 3 / (1 + step)))
        asked = torch.where(own, margin.target(cos), margin.others(cos))
        logits = 40 * (cos + share * (asked - cos)) + head.offset
        losses = torch.where(own, 0.7 * F.softplus(-logits), 0.3 * F.softplus(logits))
        assert head(x, labels).item() == pytest.approx(losses.sum(1).mean().item() / 40, rel=1e-6)


def test_gradients_of_annealed_others():
    head, x, labels = head_and_batch(SphereFace2(), annealing=TENTH)
    x.requires_grad_()
    inputs = (x, *head.parameters())
    assert torch.autograd.gradcheck(lambda x, *_: head(x, labels), inputs, atol=1e-6)


def test_a_diagnosis_uses_the_margin_on_the_others():
    """35 degrees to its own class and 55 to the other, which the full margin counts as 27.5."""
    for annealing, inside in ((None, 1.0), (TENTH, 0.0)):
        head = MarginSoftmax(2, 2, SphereFaceR(m=2, version=2), annealing=annealing)
        assert head.diagnose(*at_angle(head, 35)).inside == inside


@pytest.mark.parametrize("name", sorted(set(registry) - {"sphereface2"}))
def test_cosines_that_no_margin_changes_are_not_copied(name: str):
    cos = torch.rand(3, 5)
    assert apply_share(cos, registry[name]().others(cos), torch.tensor(0.3)) is cos


@pytest.mark.parametrize("margin", ["a-softmax", "sphereface2"])
def test_an_annealed_head_compiles_without_graph_breaks(margin: str):
    head, x, labels = head_and_batch(margin, annealing=Automatic(pace=0.5))
    twin = copy.deepcopy(head)
    compiled = torch.compile(head, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(x, labels), twin(x, labels))
    torch.testing.assert_close(head.eased_in, twin.eased_in)


# --- the initial share ---


@pytest.mark.parametrize(
    ("annealing", "share"),
    [(Annealing(), 1 / 1001), (TENTH, 0.1), (Annealing(start=1), 1 / 6), (Automatic(), 0.0), (None, 1.0)],
    ids=str,
)
def test_a_new_head_has_its_initial_share(annealing: AnyAnnealing | None, share: float):
    head = MarginSoftmax(2, 2, ASoftmax(), annealing=annealing)
    assert head.eased_in.item() == pytest.approx(share, rel=1e-6)
    assert head.diagnose(*at_angle(head, 30)).used == pytest.approx(share, rel=1e-6)
    if isinstance(annealing, Annealing):
        assert torch.equal(head.eased_in, annealing.share(head.step))


def test_reset_parameters_restarts_annealing():
    head, x, labels = head_and_batch("arcface", annealing=HALVES, scale="learned")
    head(x, labels)
    with torch.no_grad():
        head.scale.log.fill_(7)
    head.reset_parameters()
    assert head.step.item() == 0
    assert head.eased_in.item() == 0.25
    assert head.scale.log.item() == pytest.approx(math.log(64))


# --- precision ---

CASTS = {
    "half": nn.Module.half,
    "bfloat16": nn.Module.bfloat16,
    "double": nn.Module.double,
    "to": lambda module: module.to(torch.bfloat16),
    "twice": lambda module: module.half().float(),
    "within": lambda module: nn.Sequential(module).bfloat16()[0],
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_the_share_stays_in_float32_when_weights_are_cast(cast):
    head = MarginSoftmax(2, 2, annealing="auto")
    head.eased_in.fill_(0.12345)
    found = cast(head).eased_in
    assert found.dtype == torch.float32
    assert torch.equal(found, torch.tensor(0.12345))
    assert "eased_in" in head.state_dict()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_automatic_annealing_advances_in_half_precision(dtype: torch.dtype):
    """In half precision, 0.9 plus a thousandth of the remainder is 0.9."""
    head = MarginSoftmax(2, 2, annealing=Automatic(pace=0.001)).to(dtype)
    feature, label = at_angle(head, 10)
    head.eased_in.fill_(0.9)
    for _ in range(200):
        head(feature.to(dtype), label)
    assert head.eased_in.item() == pytest.approx(1 - 0.1 * 0.999**200, rel=1e-4)


def test_heads_on_the_meta_device():
    with torch.device("meta"):
        head = MarginSoftmax(5, 4, "a-softmax", scale="learned")
    cast = head.to(torch.bfloat16)
    assert (cast.eased_in.device.type, cast.eased_in.dtype) == ("meta", torch.float32)
    made = head.to_empty(device="cpu").float()
    made.reset_parameters()
    assert made.eased_in.item() == pytest.approx(1 / 1001)
    assert made(torch.randn(3, 5), torch.tensor([0, 1, 3])).isfinite()
    assert made.to("meta").eased_in.is_meta
