"""Every margin against plain loops and another library, and safe wherever angles end."""

import math

import pytest
import torch
from heads_and_batches import head_and_batch
from hypothesis import given
from hypothesis import strategies as st
from margins_in_loops import loss_of, psi

import dcnet
from dcnet.losses import (
    ASoftmax,
    LSoftmax,
    MarginSoftmax,
    SphereFaceR,
    as_margin,
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
