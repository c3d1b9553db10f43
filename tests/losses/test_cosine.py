"""Cosines with class weights and their gradients, compared with loops and autograd."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcnet.losses import MarginSoftmax, cosine
from dcnet.losses.cosine import cosines


def drawn(features=5, classes=7, size=4, dtype=torch.float64, seed=0):
    chance = torch.Generator().manual_seed(seed)
    unit = torch.nn.functional.normalize(torch.randn(features, size, dtype=dtype, generator=chance))
    weight = torch.randn(classes, size, dtype=dtype, generator=chance)
    return unit.requires_grad_(), weight.requires_grad_(), torch.randint(classes, (features,), generator=chance)


def plainly(unit, weight, labels):
    """The same results, computed with operations of torch."""
    norms = (weight.square().sum(1) + cosine.EPS).sqrt()
    cos = unit @ (weight / norms[:, None]).T
    return cos, cos[torch.arange(len(labels)), labels], norms


def test_cosines_equal_those_of_a_loop():
    unit, weight, labels = drawn()
    cos, own, norms = cosines(unit, weight, labels)
    for row, feature in enumerate(unit.tolist()):
        for column, other in enumerate(weight.tolist()):
            product = sum(one * two for one, two in zip(feature, other, strict=True))
            length = math.sqrt(sum(one * one for one in other))
            assert cos[row, column].item() == pytest.approx(product / length, abs=1e-9)
            assert norms[column].item() == pytest.approx(length)
    assert own.tolist() == [cos[row, label].item() for row, label in enumerate(labels.tolist())]


@pytest.mark.parametrize("labels", [[0, 3, 6, 3, 2], [1, 1, 1, 1, 1]], ids=["several", "one"])
def test_first_and_second_derivatives(labels):
    unit, weight, _ = drawn()
    labels = torch.tensor(labels)
    assert torch.autograd.gradcheck(lambda *given: cosines(*given, labels), (unit, weight))
    assert torch.autograd.gradgradcheck(lambda *given: cosines(*given, labels), (unit, weight))


@given(
    st.integers(1, 6), st.integers(2, 40), st.integers(1, 9), st.sampled_from([1e-3, 1.0, 1e3]), st.integers(1, 9),
    st.integers(1, 30),
)  # fmt: skip
def test_gradients_equal_those_of_autograd_for_any_number_of_parts(features, classes, size, length, parts, least):
    unit, weight, labels = drawn(features, classes, size)
    weight = (weight.detach() * length).requires_grad_()
    before = cosine.PARTS, cosine.LEAST
    cosine.PARTS, cosine.LEAST = parts, least
    try:
        found, expected = (gradients(of, unit, weight, labels) for of in (cosines, plainly))
    finally:
        cosine.PARTS, cosine.LEAST = before
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12 / length)


def gradients(of, unit, weight, labels):
    """Gradients of a weighted sum of all three results."""
    chance = torch.Generator().manual_seed(1)
    results = of(unit, weight, labels)
    total = sum((each * torch.randn(each.shape, dtype=each.dtype, generator=chance)).sum() for each in results)
    return torch.autograd.grad(total, (unit, weight))


def test_weights_and_features_of_zeros_have_finite_gradients():
    unit, weight, labels = drawn(dtype=torch.float32)
    with torch.no_grad():
        weight[2] = 0
        unit[1] = 0
    for gradient in gradients(cosines, unit, weight, labels):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("frozen", ["features", "weights"])
def test_gradients_that_are_not_needed_are_not_computed(frozen):
    unit, weight, labels = drawn()
    of_unit, of_weight = gradients(cosines, unit, weight, labels)
    kept, expected = (weight, of_weight) if frozen == "features" else (unit, of_unit)
    (unit if frozen == "features" else weight).requires_grad_(False)
    chance = torch.Generator().manual_seed(1)
    results = cosines(unit, weight, labels)
    sum((each * torch.randn(each.shape, dtype=each.dtype, generator=chance)).sum() for each in results).backward()
    torch.testing.assert_close(kept.grad, expected)
    assert (unit if frozen == "features" else weight).grad is None


def test_autocast_around_the_backward_pass_changes_nothing():
    unit, weight, labels = drawn(dtype=torch.float32)
    expected = torch.autograd.grad(cosines(unit, weight, labels)[0].sum(), (unit, weight))
    total = cosines(unit, weight, labels)[0].sum()
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(total, (unit, weight))
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


@pytest.mark.parametrize("margin", ["softmax", "arcface", "sphereface2"])
def test_a_head_compiles_without_graph_breaks(margin):
    torch.manual_seed(0)
    head, labels = MarginSoftmax(6, 9, margin), torch.tensor([0, 8, 3, 3])
    features = torch.randn(4, 6, requires_grad=True)
    expected = torch.autograd.grad(head(features, labels), (features, head.weight))
    compiled = torch.compile(head, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(features, labels), (features, head.weight))
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("margin", ["arcface", "a-softmax"])
def test_a_head_is_differentiated_by_torch_func(margin):
    head, labels = MarginSoftmax(4, 9, margin).double(), torch.tensor([0, 8, 3, 3])
    features = torch.randn(4, 4, dtype=torch.float64)
    expected = torch.autograd.grad(head.eval()(features, labels), head.weight)

    def loss(weight):
        # Copies of the buffers, since torch.func does not allow writes to them, as in batch normalization.
        given = {**{name: value.clone() for name, value in head.named_buffers()}, "weight": weight}
        return torch.func.functional_call(head, given, (features, labels))

    torch.testing.assert_close(torch.func.grad(loss)(head.weight.detach()), *expected)
    second = torch.func.jacrev(torch.func.jacrev(loss))(head.weight.detach()).reshape(36, 36)
    torch.testing.assert_close(second, second.T)
    assert second.abs().max() > 1e-3
