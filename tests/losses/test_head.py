"""Margin heads: scale, prediction, state, and checks of arguments."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.heads_and_batches import head_and_batch
from torch import Tensor

import dcnet
from dcnet.losses import (
    Annealing,
    ASoftmax,
    Automatic,
    MarginSoftmax,
    ShardedMarginSoftmax,
    SphereFaceR,
    as_margin,
    feature_incay,
    registry,
)
from dcnet.losses.cosine import EPS, directions
from dcnet.losses.cosine_margins import monotone_cosine
from dcnet.parameters import Learnable
from dcnet.training.build import build_model
from dcnet.training.config import config_of
from dcnet.training.recipes import command_of, recipe

# --- annealing, scale, prediction ---


def test_annealing_blends_the_cosine_with_the_margin():
    annealing = Annealing(start=1000, rate=0.12, floor=5)
    weights = [annealing.share(torch.tensor(step)).item() for step in (0, 100, 10**6)]
    assert weights == pytest.approx([1 / 1001, 1 / (1 + 1000 / 13), 1 / 6])
    head, x, labels = head_and_batch(ASoftmax(m=4), annealing=Annealing(start=3, rate=1, floor=1))
    plain, full = (MarginSoftmax(5, 4, name, annealing=None).double() for name in ("m-softmax", ASoftmax(m=4)))
    for other in (plain, full):
        other.weight = head.weight
    logits = plain.logits(x)
    norms, cos = x.norm(dim=1), head.cosines(x).gather(1, labels[:, None]).squeeze(1)
    for step in range(4):
        easing = max(1.0, 3 / (1 + step))
        target = norms * (easing * cos + monotone_cosine(cos, 4)) / (1 + easing)
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


def test_default_annealing_of_margins():
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
    if not fixed.margin.binary and not fixed.margin.uses_norms:
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


def test_a_new_margin_is_one_class():
    """Heads, specs and plots accept it, binary or not."""
    from dcnet.report.operator_plots import margin_curves

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
        dcnet.losses.register(Halved)
        head, x, labels = head_and_batch(f"halved-{binary}(m=3.0)")
        head(x, labels).backward()
        assert head.margin.m == 3.0
        assert head.weight.grad.isfinite().all()
        assert len(margin_curves([f"halved-{binary}"]).axes[0].get_lines()) == 1
        del registry[f"halved-{binary}"]


# --- state and invalid arguments ---


def test_a_head_is_restored_from_its_state():
    head, x, labels = head_and_batch("a-softmax", annealing=Annealing())
    for _ in range(3):
        head(x, labels)
    again = MarginSoftmax(5, 4, "a-softmax").double()
    again.load_state_dict(head.state_dict())
    assert again(x, labels).item() == head(x, labels).item()


def test_a_learned_scale_in_half_precision_is_computed_in_float32():
    scale = MarginSoftmax(5, 4, "arcface", scale="learned").bfloat16().scale
    assert torch.equal(scale(torch.ones(3)), scale.log.detach().float().exp())


def test_feature_incay():
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
        (lambda: ASoftmax(m=0.5), "m of a-softmax must be in [1, 1000], not 0.5"),
        (lambda: ASoftmax(m=float("nan")), "m of a-softmax must be finite"),
        (lambda: ASoftmax(m=1e9), "m of a-softmax must be in [1, 1000], not 1000000000.0"),
        (lambda: as_margin("l-softmax(m=1001)"), "m of l-softmax must be in [1, 1000]"),
        (lambda: dcnet.losses.ArcFace(m=2.0), "m of arcface must be in [0, 1.5708), not 2.0"),
        (lambda: dcnet.losses.AMSoftmax(m=-0.1), "m of am-softmax must be in [0, 2)"),
        (lambda: SphereFaceR(version=3), "version of sphereface-r must be 1 or 2, not 3"),
        (lambda: dcnet.losses.SphereFace2(share=1.0), "share of sphereface2 must be in (0, 1)"),
        (lambda: MarginSoftmax(2, 3, "a-sofmax"), "did you mean 'a-softmax'"),
        (lambda: as_margin("arcface(0.3)"), "invalid margin 'arcface(0.3)': expected the name of a value"),
        (lambda: as_margin("arcface(m=0.3"), "invalid margin"),
        (lambda: as_margin("arcface("), "invalid margin 'arcface(': expected the name of a value"),
        (lambda: as_margin("arcface(m=__import__('os'))"), "invalid margin"),
        (lambda: as_margin("arcface(k=0.3)"), "arcface has no 'k', only m"),
        (lambda: as_margin("a-softmax(m=0.3)"), "m of a-softmax must be in [1, 1000], not 0.3"),
        (lambda: MarginSoftmax(2, 1), "num_classes must be a whole number, 2 or more, not 1"),
        (lambda: MarginSoftmax(2, 3, scale="big"), "scale must be a number, 'norm' or 'learned', not 'big'"),
        (lambda: MarginSoftmax(2, 3, scale=0.0), "scale must be in (0, 3.40282e+38], not 0.0"),
        (lambda: MarginSoftmax(2, 3, scale=1e39), "scale must be in (0, 3.40282e+38], not 1e+39"),
        (lambda: MarginSoftmax(2, 3, "sphereface2", scale="norm"), "requires a scale that is a number"),
        (lambda: MarginSoftmax(2, 3, annealing="slow"), "annealing must be an Annealing, 'auto' or None, not 'slow'"),
        (lambda: Annealing(start=-1), "start of an annealing must not be negative"),
        (lambda: Automatic(ready=95), "ready must be in (0, 90), not 95"),
    ],
)
def test_invalid_arguments_raise_value_errors(make, words):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the words follow
        make()
    assert words in str(error.value)


def test_features_and_labels_that_do_not_fit_are_rejected():
    head = MarginSoftmax(3, 4)
    with pytest.raises(ValueError, match="label 4 must be one of the 4 classes, from 0 to 3"):
        head(torch.randn(2, 3), torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="label -1 must be one of"):
        head(torch.randn(2, 3), torch.tensor([0, -1]))
    with pytest.raises(ValueError, match=r"not \[2, 5\] and \[2\]"):
        head(torch.randn(2, 5), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"not \[2, 3\] and \[3\]"):
        head(torch.randn(2, 3), torch.tensor([0, 1, 2]))


RANGE = "label_smoothing must be in [0, 1), not "

# --- label smoothing, and scales ---


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: MarginSoftmax(4, 3, "sphereface2", label_smoothing=0.1),
            "margin 'sphereface2' does not support label_smoothing (got 0.1)",
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
            "scale must be one number for all classes, Learnable(30.0), not Learnable(init=30.0, per_channel=True",
        ),
    ],
)
def test_invalid_smoothing_and_scales_raise_value_errors(make: Callable[[], MarginSoftmax], words: str):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the words follow
        make()
    assert words in str(error.value)


@pytest.mark.parametrize("kind", [MarginSoftmax, ShardedMarginSoftmax])
@pytest.mark.parametrize(("features", "classes"), [(5.0, 4), (5, 4.0), ("5", 4), (True, 4), (0, 4), (5, 1)])
def test_invalid_sizes_are_rejected(kind: type[MarginSoftmax], features: Any, classes: Any):
    with pytest.raises(ValueError, match=r"(in_features|num_classes) must be a whole number, . or more"):
        kind(features, classes)


def test_sizes_may_be_numpy_integers():
    head = MarginSoftmax(np.int64(5), np.int32(4))
    assert head(torch.randn(3, 5), torch.tensor([0, 1, 3])).isfinite()


@pytest.mark.parametrize("name", ["ready", "pace", "most"])
@pytest.mark.parametrize("value", ["0.5", True, None])
def test_annealing_arguments_must_be_numbers(name: str, value: Any):
    with pytest.raises(TypeError, match=f"{name} must be a number, not {value!r}"):
        Automatic(**{name: value})


def test_label_smoothing_equals_that_of_torch():
    head, x, labels = head_and_batch("m-softmax", label_smoothing=0.2)
    expected = F.cross_entropy(head.logits(x), labels, label_smoothing=0.2)
    assert head(x, labels).item() == pytest.approx(expected.item())


def test_a_recipe_with_label_smoothing_accepts_margins_without_it():
    """The record has the value that is used."""
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
def test_features_of_another_shape_are_rejected(name: str, shape: list[int]):
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
def test_other_labels_are_rejected(dtype: torch.dtype):
    with pytest.raises(ValueError, match=f"labels must be integers, not {dtype}"):
        MarginSoftmax(5, 4)(torch.randn(3, 5), torch.zeros(3, dtype=dtype))


# --- huge features ---


@pytest.mark.parametrize("size", [1e14, 1e16, 1e19, 1e30, 1e35])
@pytest.mark.parametrize("name", registry)
def test_huge_features_keep_their_directions(name: str, size: float):
    head, x, labels = head_and_batch(name)
    head, x = head.float(), x.float()
    head.eval()
    torch.testing.assert_close(head.cosines(size * x), head.cosines(x))
    features = (size * x).requires_grad_()
    loss = head(features, labels)
    (gradient,) = torch.autograd.grad(loss, features)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    if not head.scale.is_norm and not head.margin.uses_norms:
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


def test_ordinary_rows_are_not_rescaled():
    def plainly(rows: Tensor) -> tuple[Tensor, Tensor]:
        squares = rows.square().sum(1) + EPS
        return rows * squares.rsqrt()[:, None], squares.sqrt()

    x = torch.cat([size * torch.randn(50, 7) for size in (0.0, 1e-20, 1e-3, 1.0, 1e3, 1e14)])
    assert all(torch.equal(one, two) for one, two in zip(directions(x, torch.float32), plainly(x), strict=True))
    # A huge row does not change its neighbors.
    among = torch.cat([x, torch.full((1, 7), 1e25)])
    assert torch.equal(directions(among, torch.float32)[0][:-1], plainly(x)[0])
