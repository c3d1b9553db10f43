"""Heads with a margin: annealing, scale, prediction, and what they keep, say and refuse."""

import dataclasses
import math
from typing import ClassVar

import pytest
import torch
from heads_and_batches import head_and_batch

import dcnet
from dcnet.learnable import Learnable
from dcnet.losses import (
    Annealing,
    ASoftmax,
    Automatic,
    MarginSoftmax,
    SphereFaceR,
    as_margin,
    feature_incay,
    registry,
)
from dcnet.losses.margin import multiplied

# --- annealing, scale, prediction ---


def test_annealing_blends_the_cosine_with_the_margin():
    annealing = Annealing(start=1000, rate=0.12, floor=5)
    weights = [annealing.weight(torch.tensor(step)).item() for step in (0, 100, 10**6)]
    assert weights == pytest.approx([1 / 1001, 1 / (1 + 1000 / 13), 1 / 6])
    head, x, labels = head_and_batch(ASoftmax(m=4), annealing=Annealing(start=3, rate=1, floor=1))
    plain, full = (MarginSoftmax(5, 4, name, annealing=None).double() for name in ("m-softmax", ASoftmax(m=4)))
    for other in (plain, full):
        other.weight = head.weight
    logits = plain.logits(x)
    norms, cos = x.norm(dim=1), head.cosines(x).gather(1, labels[:, None]).squeeze(1)
    for step in range(4):
        easing = max(1.0, 3 / (1 + step))
        target = norms * (easing * cos + multiplied(cos, 4)) / (1 + easing)
        expected = torch.nn.functional.cross_entropy(logits.scatter(1, labels[:, None], target[:, None]), labels)
        assert head(x, labels).item() == pytest.approx(expected.item(), rel=1e-6)
    assert head.step.item() == 4
    before = head.step.item()
    head.eval()(x, labels)
    assert head.step.item() == before


def test_automatic_annealing_follows_the_angle():
    head = MarginSoftmax(2, 2, ASoftmax(m=4), annealing=Automatic(ready=45, pace=0.5))
    with torch.no_grad():
        head.weight.copy_(torch.eye(2))

    def at(degrees):
        theta = math.radians(degrees)
        head(torch.tensor([[math.cos(theta), math.sin(theta)]]), torch.tensor([0]))
        return head.eased_in.item()

    assert at(100) == 0.0
    assert at(67.5) == pytest.approx(0.25)
    assert at(45) == pytest.approx(0.625)
    assert at(90) == pytest.approx(0.625)
    assert at(10) > 0.8


def test_annealing_is_what_the_margin_needs():
    assert MarginSoftmax(2, 3, "a-softmax").annealing == Annealing()
    assert MarginSoftmax(2, 3, "arcface").annealing is None
    assert MarginSoftmax(2, 3, "arcface", annealing="auto").annealing == Automatic()


@pytest.mark.parametrize("name", registry)
def test_scales(name):
    fixed, x, labels = head_and_batch(name, scale=7.0)
    learned = MarginSoftmax(5, 4, name, scale=Learnable(7.0), annealing=None).double()
    learned.load_state_dict(fixed.state_dict(), strict=False)
    assert learned(x, labels).item() == pytest.approx(fixed(x, labels).item(), rel=1e-6)
    learned(x, labels).backward()
    assert learned.scale.log.grad.abs() > 0
    if not fixed.margin.binary:
        kept, _, _ = head_and_batch(name, scale="norm")
        kept.load_state_dict(fixed.state_dict())
        unit = 7.0 * torch.nn.functional.normalize(x)
        assert kept(unit, labels).item() == pytest.approx(fixed(x, labels).item(), rel=1e-6)


@pytest.mark.parametrize("name", registry)
def test_prediction_has_no_margin(name):
    head, x, _ = head_and_batch(name)
    logits, cos = head.logits(x), head.cosines(x)
    if head.margin.unit_weights:
        assert torch.equal(logits.argmax(1), cos.argmax(1))
    assert logits.shape == (6, 4)
    softmax, x, labels = head_and_batch("softmax")
    assert softmax(x, labels).item() == pytest.approx(
        torch.nn.functional.cross_entropy(softmax.logits(x), labels).item()
    )


def test_the_first_bias_of_sphereface2_balances_label_and_others():
    head = MarginSoftmax(8, 5, "sphereface2").double()
    with torch.no_grad():
        head.weight.copy_(torch.eye(5, 8))
    x = torch.zeros(1, 8, dtype=torch.float64)
    x[0, 7] = 1.0
    (gradient,) = torch.autograd.grad(head(x, torch.tensor([0])), head.offset)
    assert gradient.abs() < 1e-6


def test_one_more_margin_is_one_class(monkeypatch):
    """A head takes it, each class decided by itself or not, and so do specs and pictures."""
    from dcnet.losses import margin
    from dcnet.report.margin_plots import margin_curves

    monkeypatch.setattr(margin, "registry", dict(registry))
    for binary in (False, True):

        @dataclasses.dataclass(frozen=True)
        class Halved(dcnet.losses.Margin):
            name: ClassVar[str] = f"halved-{binary}"
            about: ClassVar[str] = "s cos(theta_y) / 2"
            scale: ClassVar[float | None] = 4.0
            m: float = 2.0

            def target(self, cos):
                return cos / self.m - 1

        Halved.binary = binary
        margin.register(Halved)
        head, x, labels = head_and_batch(f"halved-{binary}(m=3.0)")
        head(x, labels).backward()
        assert head.margin.m == 3.0
        assert head.weight.grad.isfinite().all()
        assert len(margin_curves([f"halved-{binary}"]).axes[0].get_lines()) == 1


# --- what heads keep, say and refuse ---


def test_a_head_comes_back_from_its_state():
    head, x, labels = head_and_batch("a-softmax", annealing=Annealing())
    for _ in range(3):
        head(x, labels)
    again = MarginSoftmax(5, 4, "a-softmax").double()
    again.load_state_dict(head.state_dict())
    assert again(x, labels).item() == head(x, labels).item()


def test_a_learned_scale_in_half_precision_is_computed_in_float32():
    scale = MarginSoftmax(5, 4, "arcface", scale="learned").bfloat16().scale
    assert torch.equal(scale(torch.ones(3)), scale.log.detach().float().exp())


def test_incay():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    assert feature_incay(x, eps=0.5).item() == pytest.approx((1 / 25.5 + 2) / 2)
    assert [feature_incay(x.to(dtype)).dtype for dtype in (torch.float16, torch.float64)] == [
        torch.float32,
        torch.float64,
    ]
    with pytest.raises(ValueError, match=r"\[N, features\]"):
        feature_incay(x[0])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ASoftmax(m=0.5), "m of a-softmax multiplies the angle and must be 1 or more, not 0.5"),
        (lambda: ASoftmax(m=float("nan")), "m of a-softmax must be finite"),
        (lambda: ASoftmax(m=1e9), "m of a-softmax must be 1000 or less, as psi has so many parts, not 1000000000.0"),
        (lambda: as_margin("l-softmax(m=1001)"), "m of l-softmax must be 1000 or less"),
        (lambda: dcnet.losses.ArcFace(m=2.0), "m of arcface must be from 0 to less than 1.57, not 2.0"),
        (lambda: dcnet.losses.AMSoftmax(m=-0.1), "m of am-softmax must be from 0"),
        (lambda: SphereFaceR(version=3), "version of sphereface-r must be 1 or 2, not 3"),
        (lambda: dcnet.losses.SphereFace2(share=1.0), "share of sphereface2 must be between 0 and 1"),
        (lambda: MarginSoftmax(2, 3, "a-sofmax"), "did you mean 'a-softmax'"),
        (lambda: as_margin("arcface(0.3)"), "'arcface(0.3)' is no margin: write it as arcface or arcface(name=number"),
        (lambda: as_margin("arcface(m=0.3"), "is no margin"),
        (lambda: as_margin("arcface("), "'arcface(' is no margin: write it as arcface or arcface(name=number"),
        (lambda: as_margin("arcface(m=__import__('os'))"), "is no margin"),
        (lambda: as_margin("arcface(k=0.3)"), "arcface has no 'k' in 'arcface(k=0.3)': it has m"),
        (lambda: as_margin("a-softmax(m=0.3)"), "must be 1 or more, not 0.3"),
        (lambda: MarginSoftmax(2, 1), "two classes at least"),
        (lambda: MarginSoftmax(2, 3, scale="big"), "scale must be a number, 'norm' or 'learned', not 'big'"),
        (lambda: MarginSoftmax(2, 3, scale=0.0), "scale must be positive, not 0.0"),
        (lambda: MarginSoftmax(2, 3, scale=1e39), "scale must be at most 3.4e+38, which float32 can hold, not 1e+39"),
        (lambda: MarginSoftmax(2, 3, "sphereface2", scale="norm"), "needs a scale that is a number"),
        (lambda: MarginSoftmax(2, 3, annealing="slow"), "annealing must be an Annealing, 'auto' or None, not 'slow'"),
        (lambda: Annealing(start=-1), "start of an annealing must not be negative"),
        (lambda: Automatic(ready=95), "ready must be an angle between 0 and 90 degrees, not 95"),
    ],
)
def test_what_makes_no_sense_is_told(make, words):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the words follow
        make()
    assert words in str(error.value)


def test_features_and_labels_that_do_not_fit():
    head = MarginSoftmax(3, 4)
    with pytest.raises(ValueError, match="label 4 is none of the 4 classes, from 0 to 3"):
        head(torch.randn(2, 3), torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="label -1 is none"):
        head(torch.randn(2, 3), torch.tensor([0, -1]))
    with pytest.raises(ValueError, match=r"not \[2, 5\] and \[2\]"):
        head(torch.randn(2, 5), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"not \[2, 3\] and \[3\]"):
        head(torch.randn(2, 3), torch.tensor([0, 1, 2]))
