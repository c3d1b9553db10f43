"""Reductions and ignored samples, compared with loops and torch's cross entropy."""

import copy
import math
import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import margins_in_loops as loops
from helpers.heads_and_batches import head_and_batch, loop_options
from torch import Tensor

from dcnet.losses import Annealing, Automatic, MarginSoftmax, ShardedMarginSoftmax, registry

ANNEALINGS = [None, Annealing(start=3, rate=1, floor=1), Automatic(pace=0.5)]
REDUCTIONS = ["mean", "sum", "none"]


def ignoring(labels: Tensor, *places: int, by: int = -100) -> Tensor:
    labels = labels.clone()
    labels[list(places)] = by
    return labels


def gradients(head: MarginSoftmax, features: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    features = features.detach().requires_grad_()
    return torch.autograd.grad(head(features, labels).sum(), (features, *head.parameters()))


def in_a_loop(head: MarginSoftmax, features: Tensor, labels: Tensor) -> list[float]:
    """The loss of each sample; 0 if it is ignored."""
    options = loop_options(head, len(features))
    noise = options.pop("noise") or [0.0] * len(features)
    of = partial(loops.loss_of, head.margin, **options)
    return [
        0.0 if label == head.ignore_index else of(features=[x], labels=[label], noise=[n])
        for x, label, n in zip(features.tolist(), labels.tolist(), noise, strict=True)
    ]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", registry)
def test_losses_equal_those_of_a_loop(name: str, reduction: str):
    """The ignored label may be a class or any other integer."""
    head, x, labels = head_and_batch(name, count=8, reduction=reduction)
    for by in (-100, 2):
        head.ignore_index = by
        given = ignoring(labels, 0, 5, by=by)
        found = head(x, given)
        losses = in_a_loop(head, x, given)
        kept = sum(label != by for label in given.tolist())
        expected = {"none": losses, "sum": sum(losses), "mean": sum(losses) / kept}[reduction]
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("annealing", ANNEALINGS, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    "name",
    [
        *("softmax", "a-softmax", "arcface", "sphereface2", "sphereface-r(version=2)"),
        *("adaface(momentum=0.5,h=2)", "magface(l_a=1,u_a=3)", "curricularface(momentum=0.5)", "subcenter-arcface"),
    ],
)
def test_ignored_samples_have_no_effect(name: str, reduction: str, annealing: Any):
    """In losses, gradients and annealing, for two batches, also with a huge ignored feature."""
    head, x, labels = head_and_batch(name, reduction=reduction, annealing=annealing)
    without, kept = copy.deepcopy(head), torch.tensor([True, False, True, True, False, True])
    x[1] *= 1e4
    for _ in range(2):
        loss, *of_loss = [copy.deepcopy(head)(x, ignoring(labels, 1, 4)), *gradients(head, x, ignoring(labels, 1, 4))]
        expected = [copy.deepcopy(without)(x[kept], labels[kept]), *gradients(without, x[kept], labels[kept])]
        torch.testing.assert_close(loss[kept] if reduction == "none" else loss, expected[0])
        assert torch.equal(of_loss[0][~kept], torch.zeros(2, 5, dtype=torch.float64))
        of_loss[0] = of_loss[0][kept]
        for one, two in zip(of_loss, expected[1:], strict=True):
            torch.testing.assert_close(one, two)
        for one, two in zip(head.buffers(), without.buffers(), strict=True):
            torch.testing.assert_close(one, two)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reductions_equal_those_of_torch(reduction: str, smoothing: float):
    """Also if all samples are ignored, and for an empty batch."""
    head, x, labels = head_and_batch("m-softmax", label_smoothing=smoothing, reduction=reduction)
    for places in ([], [0, 3], range(6)):
        given = ignoring(labels, *places)
        expected = F.cross_entropy(head.logits(x), given, reduction=reduction, label_smoothing=smoothing)
        torch.testing.assert_close(head(x, given), expected, equal_nan=True)
    empty = head(x[:0], labels[:0])
    torch.testing.assert_close(empty, F.cross_entropy(x[:0], labels[:0], reduction=reduction), equal_nan=True)


@pytest.mark.parametrize("sample", [1.0, 0.4])
@pytest.mark.parametrize("name", ["softmax", "a-softmax", "sphereface2"])
def test_the_mean_of_an_empty_batch_is_nan_with_zero_gradients(name: str, sample: float):
    head, x = ShardedMarginSoftmax(5, 4, name, sample=sample), torch.randn(3, 5)
    ignored, nothing = torch.full((3,), -100), torch.zeros(0, dtype=torch.int64)
    for features, labels in ((x, ignored), (x[:0], nothing)):
        assert head(features, labels).isnan()
        for gradient in gradients(head, features, labels):
            assert torch.equal(gradient, torch.zeros_like(gradient))
    head.reduction = "sum"
    assert head(x, ignored).item() == head(x[:0], nothing).item() == 0
    head.reduction = "none"
    assert head(x[:0], nothing).shape == (0,)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ["am-softmax", "a-softmax", "sphereface2"])
@pytest.mark.parametrize("by", [-100, 7])
def test_sampled_classes_support_ignored_samples(name: str, reduction: str, by: int):
    """A seed draws the same classes, independent of the label of an ignored sample."""
    head = ShardedMarginSoftmax(5, 40, name, sample=0.25, reduction=reduction, annealing=Automatic()).double()
    x, labels = torch.randn(3, 5, dtype=torch.float64), torch.tensor([0, 7, 39])
    head.ignore_index, losses = by, []
    for rows, given in ((slice(None), ignoring(labels, 1, by=by)), ([0, 2], labels[[0, 2]])):
        torch.manual_seed(3)
        losses.append(copy.deepcopy(head)(x[rows], given))
    found, expected = losses
    if reduction == "none":
        assert found[1] == 0
        found = found[[0, 2]]
    torch.testing.assert_close(found, expected)


def test_autocast_and_half_precision_change_no_loss():
    head, x, labels = head_and_batch("arcface", reduction="none")
    head, x, labels = head.float(), x.bfloat16(), ignoring(labels, 2)
    with torch.autocast("cpu", torch.bfloat16):
        found = head(x, labels)
    assert found.dtype == torch.float32
    assert torch.equal(found, head(x.float(), labels))


@pytest.mark.parametrize(
    ("margin", "reduction"), [("arcface", "none"), ("arcface", "mean"), ("sphereface2", "mean"), ("sphereface2", "sum")]
)
def test_reductions_compile_without_graph_breaks(margin: str, reduction: str):
    torch.compiler.reset()
    head, x, labels = head_and_batch(margin, reduction=reduction, annealing=Automatic(pace=0.5))
    twin, labels = copy.deepcopy(head), ignoring(labels, 0, 3)
    compiled = torch.compile(head, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, labels), twin(x, labels))
    torch.testing.assert_close(head.eased_in, twin.eased_in)


def test_a_diagnosis_leaves_out_ignored_samples():
    head, x, labels = head_and_batch("arcface")
    kept = [0, 2, 3, 5]
    assert head.diagnose(x, ignoring(labels, 1, 4)) == head.diagnose(x[kept], labels[kept])
    with pytest.raises(ValueError, match="an empty batch has no angles"):
        head.diagnose(x, torch.full_like(labels, -100))


@pytest.mark.parametrize("kind", [MarginSoftmax, ShardedMarginSoftmax])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reduction": "average"}, "unknown reduction 'average': known are mean, sum, none"),
        ({"reduction": None}, "unknown reduction None: known are mean, sum, none"),
        ({"ignore_index": 1.0}, "ignore_index must be a whole number, not 1.0"),
        ({"ignore_index": None}, "ignore_index must be a whole number, not None"),
    ],
)
def test_invalid_reductions_and_indices_are_rejected(kind: type[MarginSoftmax], options: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=re.escape(words)):
        kind(5, 4, **options)


def test_labels_out_of_range_that_are_not_ignored_are_rejected():
    head = MarginSoftmax(5, 4, ignore_index=7)
    assert head(torch.randn(2, 5), torch.tensor([7, 0])).isfinite()
    for bad in (-100, -1, 4):
        with pytest.raises(ValueError, match=f"label {bad} must be one of the 4 classes"):
            head(torch.randn(2, 5), torch.tensor([7, bad]))


def test_a_head_prints_values_that_differ_from_the_default():
    assert "reduction" not in str(MarginSoftmax(5, 4))
    assert str(MarginSoftmax(5, 4, reduction="sum", ignore_index=0)).endswith(
        ", reduction='sum', ignore_index=0\n  (scale): FeatureScale()\n)"
    )


@pytest.mark.parametrize("value", [[0, 1], (0, 1), 1, None])
def test_labels_must_be_tensors(value: Any):
    words = f"labels of a head must be a tensor, not {type(value).__name__}: use torch.as_tensor"
    for kind in (MarginSoftmax, partial(ShardedMarginSoftmax, sample=0.5)):
        with pytest.raises(TypeError, match=re.escape(words)):
            kind(5, 4)(torch.randn(2, 5), value)
    with pytest.raises(TypeError, match="features of a head must be a tensor, not list"):
        MarginSoftmax(5, 4).logits([[0.0] * 5])  # type: ignore[arg-type]


# --- torch.utils.checkpoint ---


@pytest.mark.parametrize("annealing", ANNEALINGS[1:], ids=str)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_batch_counts_once(reentrant: bool, annealing: Any):
    from torch.utils.checkpoint import checkpoint

    head, x, labels = head_and_batch("a-softmax", annealing=annealing)
    twin, x = copy.deepcopy(head), x.requires_grad_()
    for step in range(3):
        loss = checkpoint(head, x, labels, use_reentrant=reentrant)
        found = torch.autograd.grad(loss, x) if not reentrant else _backward(loss, x)
        expected = twin(x, labels)
        assert torch.equal(loss, expected)
        assert torch.equal(found[0], *torch.autograd.grad(expected, x))
        assert head.step.item() == step + 1
        assert torch.equal(head.eased_in, twin.eased_in)


def _backward(loss: Tensor, x: Tensor) -> tuple[Tensor]:
    x.grad = None
    loss.backward()
    assert x.grad is not None
    return (x.grad,)


# --- huge weights ---


@pytest.mark.parametrize("size", [1e14, 1e16, 1e19, 1e22, 1e36])
@pytest.mark.parametrize("name", registry)
def test_huge_weights_keep_their_directions(name: str, size: float):
    """Gradients are finite, too."""
    head, x, labels = head_and_batch(name)
    head, x = head.float(), x.float()
    # In evaluation, since training changes the state of a margin.
    head.eval()
    cos, loss = head.cosines(x), head(x, labels)
    with torch.no_grad():
        head.weight[1:3] *= size
    torch.testing.assert_close(head.cosines(x), cos)
    assert head.logits(x).isfinite().all()
    for gradient in gradients(head, x, labels):
        assert gradient.isfinite().all()
    if head.margin.unit_weights:
        torch.testing.assert_close(head(x, labels), loss)
    assert math.isfinite(head(x, labels).item())


def test_huge_weights_are_compiled():
    """Compiled code and code on a GPU do not test the norms first."""
    torch.compiler.reset()
    head, x, labels = head_and_batch("arcface")
    head, x = head.float(), x.float()
    loss = head(x, labels)
    with torch.no_grad():
        head.weight[1:3] *= 1e22
    torch.testing.assert_close(torch.compile(head, fullgraph=True, backend="aot_eager")(x, labels), loss)
