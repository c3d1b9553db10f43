"""Margins as a plain function: logits that equal those of the heads, states, shards and checks."""

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.heads_and_batches import head_and_batch

from dcnet.losses import apply_margin, as_margin, registry

UNIT = sorted(name for name, kind in registry.items() if kind.unit_weights)


def cosines_of(head: Any, x: torch.Tensor) -> torch.Tensor:
    return F.linear(F.normalize(x), F.normalize(head.weight))


@pytest.mark.parametrize("name", UNIT)
def test_losses_and_gradients_equal_those_of_the_head(name: str):
    head, x, labels = head_and_batch(name)
    x.requires_grad_()
    state = {each: head.get_buffer(each).clone() for each in head.state_names}
    for _ in range(2):
        logits = apply_margin(cosines_of(head, x), labels, name, x.norm(dim=1), state=state)
        expected = head(x, labels)
        if head.margin.binary:
            losses = head._binary_losses(logits, logits.gather(1, labels[:, None])[:, 0], labels, head.scale(x))
            found = losses.mean()
        else:
            found = F.cross_entropy(logits, labels)
        if (penalty := head.margin.penalty(x.norm(dim=1))) is not None:
            found = found + penalty.mean()
        torch.testing.assert_close(found, expected)
        for one, two in zip(*(torch.autograd.grad(loss, (x, head.weight)) for loss in (found, expected)), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-8)
        assert {each: value.item() for each, value in state.items()} == pytest.approx(
            {each: head.get_buffer(each).item() for each in state}
        )


def test_without_a_state_the_batch_alone_counts():
    cos, labels, norms = torch.rand(6, 4), torch.tensor([0, 1, 2, 3, 0, 1]), 5 * torch.rand(6)
    margin = as_margin("adaface")
    state = {"norm_mean": norms.mean(), "norm_deviation": norms.std()}
    frozen = as_margin("adaface(momentum=0)")
    expected = apply_margin(cos, labels, frozen, norms, state=copy.deepcopy(state))
    torch.testing.assert_close(apply_margin(cos, labels, margin, norms), expected)
    assert torch.equal(apply_margin(cos, labels, margin, norms), apply_margin(cos, labels, "AdaFace", norms))
    torch.manual_seed(0)
    one, two = (apply_margin(cos, labels, "elasticface") for _ in range(2))
    assert not torch.equal(one, two)
    torch.manual_seed(0)
    assert torch.equal(apply_margin(cos, labels, "elasticface"), one)


# The statistics of the other two are those of the samples with a label.
@pytest.mark.parametrize("name", [name for name in UNIT if name not in ("adaface", "curricularface")])
def test_samples_without_a_label_have_no_margin_of_the_label(name: str):
    """As in a shard that does not hold their class; the shards together are all classes."""
    k = as_margin(name).centers()
    cos, labels, norms = torch.rand(6, 4 * k).double(), torch.tensor([0, 1, 2, 3, 0, 1]), 5 * torch.rand(6).double()
    torch.manual_seed(3)
    state = as_margin(name).first_state()
    left, right = torch.where(labels < 2, labels, -1), torch.where(labels < 2, -1, labels - 2)
    whole = apply_margin(cos, labels, name, norms, state=copy.deepcopy(state))
    parts = [
        apply_margin(part, given, name, norms, state=copy.deepcopy(state))
        for part, given in ((cos[:, : 2 * k], left), (cos[:, 2 * k :], right))
    ]
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_no_class_is_hard_for_samples_without_a_label():
    cos, state = torch.tensor([[0.9, 0.8, -0.2], [0.9, 0.8, -0.2]]), {"t": torch.tensor(0.5)}
    found = apply_margin(cos, torch.tensor([-1, 2]), "curricularface(momentum=0)", state=state)
    torch.testing.assert_close(found[0], 64 * cos[0])
    torch.testing.assert_close(found[1, :2], 64 * cos[1, :2] * (0.5 + cos[1, :2]))


@pytest.mark.parametrize("name", UNIT)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_extreme_cosines_have_finite_logits_and_gradients(name: str, dtype: torch.dtype):
    cos = torch.tensor([[1.0, -1.0, 0.0], [-1.0, 1.0, 1.0]]).repeat_interleave(as_margin(name).centers(), 1)
    cos = cos.to(dtype).requires_grad_()
    norms = torch.tensor([0.0, 100.0], dtype=dtype)
    logits = apply_margin(cos, torch.tensor([0, 0]), name, norms)
    assert logits.dtype == torch.float32
    assert logits.isfinite().all()
    (gradient,) = torch.autograd.grad(F.cross_entropy(logits, torch.tensor([0, 0])), cos)
    assert gradient.isfinite().all()


def test_filtered_classes_have_no_logits():
    cos = torch.tensor([[0.9, 0.8, 0.2], [0.9, 0.1, -0.2]])
    found = apply_margin(cos, torch.tensor([0, 1]), "am-softmax", interclass_filtering_threshold=0.5)
    expected = torch.tensor([[30 * 0.55, -torch.inf, 6.0], [-torch.inf, -7.5, -6.0]])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"margin": "softmax"}, "margin 'softmax' depends on the norms of the weights: use MarginSoftmax"),
        ({"margin": "adaface"}, "margin 'adaface' needs the norms of the features: give norms=features.norm(dim=1)"),
        ({"margin": "a-softmax"}, "margin 'a-softmax' needs the norms of the features"),
        ({"margin": "adaface", "norms": torch.ones(3)}, "norms must be [2], one per sample, not [3]"),
        ({"margin": "arcface", "labels": torch.zeros(3).long()}, "and labels [N], not [2, 4] and [3]"),
        ({"margin": "subcenter-arcface"}, "needs cosines [N, C * 3], C > 0, and labels [N], not [2, 4] and [2]"),
        (
            {"margin": "arcface", "cosines": torch.zeros(2, 0)},
            "needs cosines [N, C], C > 0, and labels [N], not [2, 0]",
        ),
        ({"margin": "arcface", "labels": torch.tensor([-1, 4])}, "labels must be from 0 to 3, or negative, not 4"),
        (
            {"margin": "subcenter-arcface(k=2)", "labels": torch.tensor([0, 2])},
            "labels must be from 0 to 1, or negative",
        ),
        ({"margin": "arcface", "labels": torch.tensor([0.5, 1.0])}, "labels must be integers, not torch.float32"),
        ({"margin": "arcface", "labels": torch.tensor([True, False])}, "labels must be integers, not torch.bool"),
        (
            {"margin": "adaface(m=0.2)", "norms": torch.ones(2), "state": {"t": torch.tensor(0.0)}},
            "the state of margin 'adaface' must have 'norm_mean': start with as_margin('adaface(m=0.2)').first_state()",
        ),
        ({"margin": "arcface", "scale": 0.0}, "scale must be positive, not 0.0"),
        (
            {"margin": "curricularface", "state": {"t": torch.zeros(2)}},
            "the state 't' of a margin must be a tensor [], not [2]",
        ),
        (
            {"margin": "arcface", "interclass_filtering_threshold": 0},
            "interclass_filtering_threshold must be in (0, 1], not 0",
        ),
    ],
)
def test_bad_input_raises_one_sentence(given: dict[str, Any], words: str):
    given = {"cosines": torch.zeros(2, 4), "labels": torch.tensor([0, 1]), **given}
    with pytest.raises(ValueError, match=re.escape(words)):
        apply_margin(**given)


def test_a_rejected_call_does_not_change_the_state():
    margin = as_margin("adaface")
    state, before = margin.first_state(), margin.first_state()
    with pytest.raises(ValueError, match="interclass_filtering_threshold must be in"):
        apply_margin(
            torch.zeros(2, 4),
            torch.tensor([0, 1]),
            margin,
            torch.tensor([1.0, 90.0]),
            state=state,
            interclass_filtering_threshold=2.0,
        )
    assert state == before


def test_state_must_be_tensors():
    state: Any = {name: value.item() for name, value in as_margin("adaface").first_state().items()}
    with pytest.raises(TypeError, match="the state 'norm_mean' of a margin must be a tensor, not float"):
        apply_margin(torch.zeros(2, 4), torch.tensor([0, 1]), "adaface", torch.ones(2), state=state)


def test_norms_must_be_a_tensor():
    with pytest.raises(TypeError, match="norms must be a tensor, not list"):
        apply_margin(torch.zeros(2, 4), torch.tensor([0, 1]), "adaface", norms=[1.0, 2.0])  # type: ignore[arg-type]
