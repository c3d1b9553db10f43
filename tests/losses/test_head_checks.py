"""What heads refuse, and features that are huge."""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from heads_and_batches import head_and_batch
from torch import Tensor

from dcnet.learnable import Learnable
from dcnet.losses import Automatic, MarginSoftmax, ShardedMarginSoftmax, registry
from dcnet.losses.cosine import EPS, directions
from dcnet.training.build import build_model
from dcnet.training.config import config_of
from dcnet.training.recipes import command_of, recipe

RANGE = "label_smoothing must be 0 or more and less than 1, not "

# --- label smoothing, and scales ---


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: MarginSoftmax(4, 3, "sphereface2", label_smoothing=0.1),
            "sphereface2 decides each class by itself and takes no label_smoothing, not 0.1",
        ),
        (
            lambda: MarginSoftmax(4, 3, label_smoothing=1.0),
            RANGE + "1.0",
        ),
        (
            lambda: MarginSoftmax(4, 3, label_smoothing=-0.1),
            RANGE + "-0.1",
        ),
        (lambda: MarginSoftmax(4, 3, label_smoothing=math.nan), "label_smoothing must be finite, not nan"),
        (
            lambda: MarginSoftmax(4, 3, "arcface", scale=Learnable(30.0, per_channel=True)),
            "scale is one number for all classes, Learnable(30.0), not Learnable(init=30.0, per_channel=True",
        ),
    ],
)
def test_what_makes_no_sense_is_one_sentence(make: Callable[[], MarginSoftmax], words: str):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the words follow
        make()
    assert words in str(error.value)


@pytest.mark.parametrize("kind", [MarginSoftmax, ShardedMarginSoftmax])
@pytest.mark.parametrize(("features", "classes"), [(5.0, 4), (5, 4.0), ("5", 4), (True, 4), (0, 4), (5, 1)])
def test_sizes_that_are_none_are_refused(kind: type[MarginSoftmax], features: Any, classes: Any):
    words = f"a head needs a whole number of features and two classes at least, not {features!r} and {classes!r}"
    with pytest.raises(ValueError, match=re.escape(words)):
        kind(features, classes)


def test_sizes_may_be_of_numpy():
    head = MarginSoftmax(np.int64(5), np.int32(4))
    assert head(torch.randn(3, 5), torch.tensor([0, 1, 3])).isfinite()


@pytest.mark.parametrize("name", ["ready", "pace", "most"])
@pytest.mark.parametrize("value", ["0.5", True, None])
def test_annealing_takes_numbers(name: str, value: Any):
    with pytest.raises(TypeError, match=f"{name} must be a number, not {value!r}"):
        Automatic(**{name: value})


def test_label_smoothing_is_that_of_torch():
    head, x, labels = head_and_batch("m-softmax", label_smoothing=0.2)
    expected = F.cross_entropy(head.logits(x), labels, label_smoothing=0.2)
    assert head(x, labels).item() == pytest.approx(expected.item())


def test_a_recipe_with_label_smoothing_takes_margins_that_have_none():
    """And its record says so."""
    assert recipe("paper-cifar").label_smoothing == 0.01
    assert recipe("paper-cifar", margin="arcface").label_smoothing == 0.01
    config = recipe("paper-cifar", margin="sphereface2", model="cnn9-small", width=0.1)
    assert config.label_smoothing == 0
    assert config_of(config.described()) == config
    assert config == recipe("paper-cifar", margin="sphereface2", model="cnn9-small", width=0.1, label_smoothing=0.0)
    assert "--label-smoothing 0.0" in command_of(config)
    network = build_model(config, 10, 3, 32)
    loss, _ = network(torch.rand(2, 3, 32, 32), torch.tensor([0, 9]))
    assert loss.isfinite()


# --- features and labels ---


@pytest.mark.parametrize("shape", [[2, 3, 5], [2, 4], [5]])
@pytest.mark.parametrize("name", ["arcface", "softmax"])
def test_features_of_another_shape_are_refused(name: str, shape: list[int]):
    head = MarginSoftmax(5, 4, name)
    for call in (head.logits, head.cosines):
        with pytest.raises(ValueError, match=re.escape(f"a head takes features [N, 5], not {shape}")):
            call(torch.randn(shape))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
@pytest.mark.parametrize("kind", [MarginSoftmax, functools.partial(ShardedMarginSoftmax, sample=0.9)])
@pytest.mark.parametrize("name", registry)
def test_labels_are_integers_of_any_kind(name: str, kind: Callable[..., MarginSoftmax], dtype: torch.dtype):
    head, x, labels = kind(5, 4, name).eval(), torch.randn(3, 5), torch.tensor([0, 3, 1])
    assert torch.equal(head(x, labels.to(dtype)), head(x, labels))
    assert head.diagnose(x, labels.to(dtype)) == head.diagnose(x, labels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_other_labels_are_refused(dtype: torch.dtype):
    with pytest.raises(ValueError, match=f"labels must be integers, not {dtype}"):
        MarginSoftmax(5, 4)(torch.randn(3, 5), torch.zeros(3, dtype=dtype))


# --- huge features ---


@pytest.mark.parametrize("size", [1e14, 1e16, 1e19, 1e30, 1e35])
@pytest.mark.parametrize("name", registry)
def test_huge_features_have_their_directions(name: str, size: float):
    head, x, labels = head_and_batch(name)
    head, x = head.float(), x.float()
    torch.testing.assert_close(head.cosines(size * x), head.cosines(x))
    features = (size * x).requires_grad_()
    loss = head(features, labels)
    (gradient,) = torch.autograd.grad(loss, features)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    if not head.scale.is_norm:
        torch.testing.assert_close(loss, head(x, labels))


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e20])
def test_norms_and_gradients_of_huge_features(size: float):
    x = (size * torch.randn(4, 6, dtype=torch.float64)).float().requires_grad_()
    unit, norms = directions(x, torch.float32)
    found = torch.autograd.grad((unit * torch.arange(6.0)).sum() + norms.sum(), x)[0]
    exact = x.detach().double().requires_grad_()
    lengths = (exact.square().sum(1) + EPS).sqrt()
    total = (exact / lengths[:, None] * torch.arange(6.0)).sum() + lengths.sum()
    torch.testing.assert_close(norms, lengths.float())
    torch.testing.assert_close(found, torch.autograd.grad(total, exact)[0].float())


def test_all_others_keep_their_bits():
    def plainly(rows: Tensor) -> tuple[Tensor, Tensor]:
        squares = rows.square().sum(1) + EPS
        return rows * squares.rsqrt()[:, None], squares.sqrt()

    x = torch.cat([size * torch.randn(50, 7) for size in (0.0, 1e-20, 1e-3, 1.0, 1e3, 1e14)])
    assert all(torch.equal(one, two) for one, two in zip(directions(x, torch.float32), plainly(x), strict=True))
    # One that is huge does not change its neighbours.
    among = torch.cat([x, torch.full((1, 7), 1e25)])
    assert torch.equal(directions(among, torch.float32)[0][:-1], plainly(x)[0])
