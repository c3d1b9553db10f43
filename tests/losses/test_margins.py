"""Every margin against plain loops and another library, and safe wherever angles end."""

import dataclasses
import math
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from margins_in_loops import loss_of, psi

import dcnet
from dcnet.learnable import Learnable
from dcnet.losses import (
    Annealing,
    ASoftmax,
    Automatic,
    LSoftmax,
    MarginSoftmax,
    SphereFaceR,
    as_margin,
    feature_incay,
    registry,
)
from dcnet.losses.margin import CHEBYSHEV, multiplied

MARGINS = [
    *(kind() for kind in registry.values()),
    *(ASoftmax(m) for m in (1, 2, 3, 1.35, 2.5)),
    LSoftmax(m=3.3),
    SphereFaceR(version=2, detach=False),
    SphereFaceR(m=2.2, detach=False),
]


def head_and_batch(margin, count=6, features=5, classes=4, seed=0, **options):
    torch.manual_seed(seed)
    options.setdefault("annealing", None)
    head = MarginSoftmax(features, classes, margin, **options).double()
    if head.bias is not None:
        torch.nn.init.normal_(head.bias)
    return head, torch.randn(count, features, dtype=torch.float64), torch.randint(classes, (count,))


def in_loops(head, x, labels):
    bias = None if head.bias is None else head.bias.tolist()
    offset = 0.0 if head.offset is None else head.offset.item()
    return loss_of(head.margin, x.tolist(), head.weight.tolist(), labels.tolist(), bias, head.scale.fixed, offset)


@pytest.mark.parametrize("margin", MARGINS, ids=str)
def test_losses_are_those_of_the_papers(margin):
    for seed in range(3):
        head, x, labels = head_and_batch(margin, seed=seed)
        assert head(x, labels).item() == pytest.approx(in_loops(head, x, labels), rel=1e-9)


@pytest.mark.parametrize("margin", MARGINS, ids=str)
def test_losses_of_features_that_point_away_from_their_class(margin):
    """Beyond pi - m, where a margin that is added to the angle goes on in another way."""
    head, x, labels = head_and_batch(margin)
    x = -head.weight[labels].detach() + 0.02 * x
    assert head.cosines(x).gather(1, labels[:, None]).max() < math.cos(math.pi - 0.3)
    assert head(x, labels).item() == pytest.approx(in_loops(head, x, labels), rel=1e-9)


@pytest.mark.parametrize("margin", [margin for margin in MARGINS if not getattr(margin, "detach", False)], ids=str)
def test_gradients(margin):
    head, x, labels = head_and_batch(margin)
    x.requires_grad_()
    inputs = (x, *head.parameters())
    assert torch.autograd.gradcheck(lambda x, *_: head(x, labels), inputs, atol=1e-6)


def test_a_detached_margin_has_the_gradient_of_the_cosine():
    head, x, labels = head_and_batch(SphereFaceR())
    free = MarginSoftmax(5, 4, SphereFaceR(detach=False), annealing=None).double()
    free.load_state_dict(head.state_dict())
    assert head(x, labels).item() == pytest.approx(free(x, labels).item())
    own, other = (torch.autograd.grad(module(x, labels), module.weight)[0] for module in (head, free))
    assert (own - other).norm() > 0.01 * other.norm()


@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_polynomials_are_multiples_of_the_angle(m):
    theta = torch.linspace(0, math.pi, 1001, dtype=torch.float64)
    torch.testing.assert_close(CHEBYSHEV[m](theta.cos()), torch.cos(m * theta), rtol=0, atol=1e-12)


@given(m=st.floats(1, 8), theta=st.floats(0.001, math.pi - 0.001))
def test_psi_of_any_real_m(m, theta):
    cos = torch.tensor([math.cos(theta)], dtype=torch.float64)
    assert multiplied(cos, m).item() == pytest.approx(psi(theta, m), abs=1e-6)


@given(m=st.floats(1, 8))
def test_psi_falls_and_does_not_jump(m):
    theta = torch.linspace(0, math.pi, 4001, dtype=torch.float64)
    found = multiplied(theta.cos(), m)
    steps = found.diff()
    assert steps.max() <= 1e-9
    assert steps.min() >= -1.01 * m * math.pi / 4000
    assert found[0].item() == pytest.approx(1)


@pytest.mark.parametrize("name", registry)
def test_targets_ask_for_more_than_the_cosine_and_keep_falling(name):
    margin, theta = as_margin(name), torch.linspace(0, math.pi, 2001, dtype=torch.float64)
    target, others = margin.target(theta.cos()), margin.others(theta.cos())
    assert (target <= others + 1e-12).all()
    assert (target.diff() <= 1e-12).all()


ENDS = [0.0, math.pi, math.pi / 2, *(k * math.pi / 4 for k in (1, 3)), *(k * math.pi / 3 for k in (1, 2)), 1e-4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("margin", MARGINS, ids=str)
def test_losses_and_gradients_are_finite_everywhere(margin, dtype):
    """At theta = 0, pi and the ends of intervals, for features of zeros, huge and tiny ones, in half precision."""
    head = MarginSoftmax(2, 3, margin, annealing=None)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]))
    directions = torch.tensor([[math.cos(theta), math.sin(theta)] for theta in ENDS])
    sizes = [1.0, 1e-4, 100.0] if dtype == torch.float16 else [1.0, 1e-20, 1e15]
    x = torch.cat([torch.zeros(1, 2), *(size * directions for size in sizes)]).to(dtype).requires_grad_()
    loss = head(x, torch.zeros(len(x), dtype=torch.int64))
    gradients = torch.autograd.grad(loss, [x, *head.parameters()])
    assert loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients)


@given(name=st.sampled_from(sorted(registry)), seed=st.integers(0, 50), size=st.sampled_from([1e-3, 1.0, 30.0]))
def test_losses_are_finite_and_not_negative(name, seed, size):
    torch.manual_seed(seed)
    head = MarginSoftmax(3, 5, name)
    x = (size * torch.randn(7, 3)).requires_grad_()
    loss = head(x, torch.randint(5, (7,)))
    (gradient,) = torch.autograd.grad(loss, x)
    assert loss.isfinite()
    assert loss >= 0
    assert gradient.isfinite().all()


def test_autocast_changes_nothing():
    head = MarginSoftmax(64, 20, "arcface")
    x, labels = torch.randn(9, 64), torch.randint(20, (9,))
    with torch.autocast("cpu", torch.bfloat16):
        assert head(x, labels) == head(x, labels)
        found = head(x, labels)
    assert found.dtype == torch.float32
    assert found == head(x, labels)


# --- against pytorch-metric-learning ---


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("margin", "theirs", "options"),
    [
        (ASoftmax(m=4), "SphereFaceLoss", {"margin": 4, "scale": 1}),
        (ASoftmax(m=2), "SphereFaceLoss", {"margin": 2, "scale": 1}),
        (LSoftmax(m=4), "LargeMarginSoftmaxLoss", {"margin": 4, "scale": 1}),
        (dcnet.losses.AMSoftmax(m=0.35), "CosFaceLoss", {"margin": 0.35, "scale": 30}),
        (dcnet.losses.ArcFace(m=0.5), "ArcFaceLoss", {"margin": math.degrees(0.5), "scale": 64}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_library_gives_the_same(margin, theirs, options):
    from pytorch_metric_learning import losses

    head, x, labels = head_and_batch(margin, count=20, features=8, classes=6)
    other = getattr(losses, theirs)(num_classes=6, embedding_size=8, **options)
    x.requires_grad_()
    with torch.no_grad():
        other.W = torch.nn.Parameter(head.weight.T.clone())
    found, expected = head(x, labels), other(x, labels)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    gradients = [torch.autograd.grad(loss, x)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("margin", MARGINS, ids=str)
def test_specs_come_back(margin):
    assert as_margin(str(margin)) == margin


def test_specs_are_short():
    assert str(ASoftmax()) == "a-softmax"
    assert str(ASoftmax(m=2)) == "a-softmax(m=2)"
    assert as_margin("sphereface-r(m=2.0, version=2)") == SphereFaceR(m=2.0, version=2)


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


def test_a_diagnosis_in_numbers_and_words():
    head = MarginSoftmax(2, 2, ASoftmax(m=2), annealing=None)
    with torch.no_grad():
        head.weight.copy_(torch.eye(2))
    degrees = torch.tensor([5.0, 21.0, 35.0, 44.0, 81.0])
    x = torch.stack([torch.deg2rad(degrees).cos(), torch.deg2rad(degrees).sin()], 1)
    found = head.diagnose(x, torch.zeros(5, dtype=torch.int64))
    assert found.mean_angle == pytest.approx(degrees.mean().item(), abs=1e-3)
    assert found.median_angle == pytest.approx(35, abs=1e-3)
    assert found.histogram[:9] == (1, 0, 1, 1, 1, 0, 0, 0, 1)
    assert found.effective_m == pytest.approx(2, abs=1e-3)
    assert found.right == pytest.approx(0.8)
    # 2 * 35 > 90 - 35 and 2 * 44 > 90 - 44, but 2 * 21 < 90 - 21.
    assert found.inside == pytest.approx(0.4)
    assert "inside the margin" in str(found)
    assert dataclasses.asdict(found)["used"] == 1.0


def test_effective_multiples_beyond_half_a_turn():
    for degrees, m in ((60, 4), (20, 4), (89, 3)):
        head = MarginSoftmax(2, 2, ASoftmax(m=m), annealing=None)
        with torch.no_grad():
            head.weight.copy_(torch.eye(2))
        theta = math.radians(degrees)
        found = head.diagnose(torch.tensor([[math.cos(theta), math.sin(theta)]]), torch.tensor([0]))
        assert found.effective_m == pytest.approx(m, rel=1e-3)


def test_incay():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    assert feature_incay(x, eps=0.5).item() == pytest.approx((1 / 25.5 + 2) / 2)
    with pytest.raises(ValueError, match=r"\[N, features\]"):
        feature_incay(x[0])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ASoftmax(m=0.5), "m of a-softmax multiplies the angle and must be 1 or more, not 0.5"),
        (lambda: ASoftmax(m=float("nan")), "m of a-softmax must be finite"),
        (lambda: dcnet.losses.ArcFace(m=2.0), "m of arcface must be from 0 to less than 1.57, not 2.0"),
        (lambda: dcnet.losses.AMSoftmax(m=-0.1), "m of am-softmax must be from 0"),
        (lambda: SphereFaceR(version=3), "version of sphereface-r must be 1 or 2, not 3"),
        (lambda: dcnet.losses.SphereFace2(share=1.0), "share of sphereface2 must be between 0 and 1"),
        (lambda: MarginSoftmax(2, 3, "a-sofmax"), "did you mean 'a-softmax'"),
        (lambda: as_margin("arcface(0.3)"), "'arcface(0.3)' is no margin: write it as arcface or arcface(name=number"),
        (lambda: as_margin("arcface(m=0.3"), "is no margin"),
        (lambda: as_margin("arcface(m=__import__('os'))"), "is no margin"),
        (lambda: as_margin("arcface(k=0.3)"), "arcface has no 'k' in 'arcface(k=0.3)': it has m"),
        (lambda: as_margin("a-softmax(m=0.3)"), "must be 1 or more, not 0.3"),
        (lambda: MarginSoftmax(2, 1), "two classes at least"),
        (lambda: MarginSoftmax(2, 3, scale="big"), "scale must be a number, 'norm' or 'learned', not 'big'"),
        (lambda: MarginSoftmax(2, 3, scale=0.0), "scale must be positive, not 0.0"),
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
