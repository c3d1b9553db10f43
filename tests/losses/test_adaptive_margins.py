"""Margins that depend on the batch: their state, its updates, random margins, regularizer, annealing and casts."""

import copy
import dataclasses
import math
import statistics
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from helpers import margins_in_loops as loops
from helpers.heads_and_batches import ADAPTIVE, head_and_batch, loop_options
from torch import Tensor

from dcnet.losses import (
    AdaFace,
    Annealing,
    ArcFace,
    Automatic,
    Batch,
    CurricularFace,
    ElasticArcFace,
    MagFace,
    Margin,
    MarginSoftmax,
    ShardedMarginSoftmax,
    apply_margin,
    as_margin,
    registry,
)
from dcnet.losses.adaptive_margins import normal_numbers

STATES = {
    "adaface": {"norm_mean", "norm_deviation"},
    "curricularface": {"t"},
    "elastic-arcface": {"draws"},
    "elastic-cosface": {"draws"},
}


def state_of(head: MarginSoftmax) -> dict[str, float]:
    return {name: head.get_buffer(name).item() for name in head.state_names}


# --- state ---


@pytest.mark.parametrize("name", registry)
def test_the_state_of_a_margin_is_flat_in_the_state_of_the_head(name: str):
    keys = set(MarginSoftmax(5, 4, name).state_dict())
    assert keys - {"weight", "bias", "offset", "step", "eased_in"} == STATES.get(name, set())


@pytest.mark.parametrize("spec", ADAPTIVE)
@pytest.mark.parametrize("annealing", [None, Automatic(pace=0.5)], ids=str)
def test_a_head_resumes_from_its_state_to_the_same_bits(spec: str, annealing: Any):
    head, x, labels = head_and_batch(spec, annealing=annealing)
    for _ in range(3):
        head(x, labels)
    torch.manual_seed(99)
    again = MarginSoftmax(5, 4, spec, annealing=annealing).double()
    again.load_state_dict(head.state_dict())
    for _ in range(2):
        assert torch.equal(again(x, labels), head(x, labels))
    assert state_of(again) == state_of(head)


@pytest.mark.parametrize("spec", ADAPTIVE)
def test_evaluation_leaves_the_state_and_repeats(spec: str):
    head, x, labels = head_and_batch(spec)
    head(x, labels)
    before = state_of(head)
    head.eval()
    assert torch.equal(head(x, labels), head(x, labels))
    assert state_of(head) == before


@pytest.mark.parametrize("spec", ADAPTIVE)
@pytest.mark.parametrize("cast", [torch.float16, torch.bfloat16, torch.float64])
def test_casts_keep_the_state(spec: str, cast: torch.dtype):
    head, x, labels = head_and_batch(spec)
    head(x, labels)
    before, dtypes = state_of(head), {name: head.get_buffer(name).dtype for name in head.state_names}
    head.to(cast)
    assert state_of(head) == before
    assert {name: head.get_buffer(name).dtype for name in head.state_names} == dtypes
    assert head(x.to(cast), labels).isfinite()


@pytest.mark.parametrize("spec", ADAPTIVE)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_batch_counts_once(spec: str, reentrant: bool):
    from torch.utils.checkpoint import checkpoint

    head, x, labels = head_and_batch(spec)
    twin, x = copy.deepcopy(head), x.requires_grad_()
    for _ in range(2):
        x.grad = None
        loss, expected = checkpoint(head, x, labels, use_reentrant=reentrant), twin(x, labels)
        assert torch.equal(loss, expected)
        loss.backward()
        assert torch.equal(x.grad, *torch.autograd.grad(expected, x))
        assert state_of(head) == state_of(twin)


@dataclasses.dataclass(frozen=True)
class Counted(Margin):
    """cos(theta_y) / batches: a margin whose gradient needs its state."""

    name: ClassVar[str] = "counted"
    about: ClassVar[str] = "s cos(theta_y) / batches, s cos(theta_j)"
    scale: ClassVar[float | None] = 4.0

    def target_in(self, cos: Tensor, batch: Batch) -> Tensor:
        return cos / batch.state["batches"]

    def first_state(self) -> dict[str, Tensor]:
        return {"batches": torch.zeros((), device="cpu")}

    def next_state(self, batch: Batch) -> dict[str, Tensor]:
        return {"batches": batch.state["batches"] + 1}


@pytest.mark.parametrize("margin", [*ADAPTIVE, Counted()], ids=str)
def test_two_batches_may_be_differentiated_at_once(margin: Margin | str):
    """The second batch changes the state before the gradients of the first are computed."""
    apart, x, labels = head_and_batch(margin)
    # In float32, as the state: a cast would copy it.
    apart, x = apart.float(), x.float().requires_grad_()
    at_once = copy.deepcopy(apart)
    one = [torch.autograd.grad(apart(x, labels), x)[0] for _ in range(2)]
    torch.testing.assert_close(torch.autograd.grad(at_once(x, labels) + at_once(x, labels), x)[0], sum(one))


@pytest.mark.parametrize("spec", [*ADAPTIVE, "combined"])
@pytest.mark.parametrize("sample", [1.0, 0.99])
def test_heads_compile_without_graph_breaks(spec: str, sample: float):
    """So nothing waits for the device; sampling counts the classes of the batch, which does."""
    torch.compiler.reset()
    head, x, labels = head_and_batch(spec, annealing=Automatic(pace=0.5))
    if sample < 1:
        head = ShardedMarginSoftmax(5, 4, spec, sample=sample).double()
    twin = copy.deepcopy(head)
    compiled = torch.compile(head, fullgraph=sample == 1, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(x, labels), twin(x, labels))
    assert state_of(head) == pytest.approx(state_of(twin))


@pytest.mark.parametrize("spec", ADAPTIVE)
def test_heads_on_the_meta_device_get_their_state_later(spec: str):
    with torch.device("meta"):
        head = MarginSoftmax(5, 4, spec)
    assert all(buffer.is_meta for buffer in head.buffers())
    head.to_empty(device="cpu").reset_parameters()
    first = state_of(MarginSoftmax(5, 4, spec))
    assert "draws" in first or state_of(head) == first
    assert head(torch.randn(3, 5), torch.tensor([0, 1, 3])).isfinite()


@pytest.mark.parametrize("name", ["adaface", "curricularface"])
def test_batches_without_statistics_keep_the_state(name: str):
    """An empty batch, a batch whose samples are all ignored, and features that are not finite."""
    head, x, labels = head_and_batch(f"{name}(momentum=0.5)")
    head(x, labels)
    before = state_of(head)
    for features, given in ((x[:0], labels[:0]), (x, torch.full_like(labels, -100)), (x * math.nan, labels)):
        head(features, given)
        assert state_of(head) == before
    head(x, labels)
    assert state_of(head) != before


# --- AdaFace ---


def test_adaface_follows_the_norms_of_the_batches():
    head, x, labels = head_and_batch("adaface", count=9)
    x[3] *= 1000.0
    mean, deviation = 20.0, 100.0
    for step in range(3):
        given = labels.clone()
        given[step] = -100
        head(x, given)
        norms = [min(max(loops.norm(row), 0.001), 100.0) for i, row in enumerate(x.tolist()) if i != step]
        mean += 0.01 * (statistics.fmean(norms) - mean)
        deviation += 0.01 * (statistics.stdev(norms) - deviation)
        assert state_of(head) == pytest.approx({"norm_mean": mean, "norm_deviation": deviation}, rel=1e-6)


def test_one_sample_has_no_deviation():
    head, x, labels = head_and_batch("adaface(momentum=0.5)", count=1)
    head(x, labels)
    assert head.norm_mean.item() == pytest.approx(10 + x.norm().item() / 2)
    assert head.norm_deviation.item() == 100.0


def test_adaface_is_arcface_for_small_norms_and_cosface_like_for_large_ones():
    """z = -1: cos(theta + m); z = 1: cos(theta - m) - 2m; z = 0: CosFace."""
    margin, cos = AdaFace(m=0.3), torch.linspace(-0.8, 0.8, 5, dtype=torch.float64)
    state = {"norm_mean": torch.tensor(50.0), "norm_deviation": torch.tensor(1.0)}
    theta = cos.acos()
    for norm, expected in ((1.0, (theta + 0.3).cos()), (99.0, (theta - 0.3).cos() - 0.6), (50.0, cos - 0.3)):
        batch = Batch(cos, torch.full_like(cos, norm), torch.ones(5).bool(), state)
        torch.testing.assert_close(margin.target_in(cos, batch), expected)


# --- MagFace ---


def test_magface_has_the_margins_and_the_regularizer_of_its_norms():
    margin, cos = MagFace(), torch.full((4,), 0.3, dtype=torch.float64)
    norms = torch.tensor([1.0, 10.0, 60.0, 1e6], dtype=torch.float64)
    found = margin.target_in(cos, Batch(cos, norms, torch.ones(4).bool(), {}))
    expected = [ArcFace(m=m).target(cos[:1]).item() for m in (0.45, 0.45, 0.625, 0.8)]
    assert found.tolist() == pytest.approx(expected)
    given = [35 * (a / 110**2 + 1 / a) for a in (10, 10, 60, 110)]
    assert margin.penalty(norms).tolist() == pytest.approx(given)


def test_the_regularizer_of_magface_grows_norms_up_to_the_limit():
    """g decreases up to u_a, where its slope is 0."""
    norms = torch.tensor([5.0, 20.0, 110.0, 200.0], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(MagFace().penalty(norms).sum(), norms)
    assert slope[[0, 3]].tolist() == [0, 0]
    assert slope[1] < 0
    assert abs(slope[2]) < 1e-12


# --- CurricularFace ---


def test_curricularface_follows_the_cosines_of_the_labels():
    head, x, labels = head_and_batch("curricularface", count=9)
    labels[4], t = -100, 0.0
    for _ in range(3):
        cosines = [
            loops.cosine(row, head.weight.tolist()[y]) for row, y in zip(x.tolist(), labels, strict=True) if y >= 0
        ]
        t += 0.01 * (statistics.fmean(cosines) - t)
        head(x, labels)
        assert head.t.item() == pytest.approx(t, rel=1e-5)


def test_hard_classes_count_by_t():
    margin, own = CurricularFace(m=0.5), torch.tensor([math.cos(1.0)], dtype=torch.float64)
    cos = torch.tensor([[math.cos(1.4), math.cos(1.6), 0.9]], dtype=torch.float64)
    batch = Batch(own, own, torch.tensor([True]), {"t": torch.tensor(0.25)})
    expected = [math.cos(1.4) * (0.25 + math.cos(1.4)), math.cos(1.6), 0.9 * 1.15]
    assert margin.others_in(cos, batch)[0].tolist() == pytest.approx(expected)


# --- ElasticFace ---


def test_random_margins_are_normal_and_differ_by_sample_and_batch():
    drawn = torch.stack([normal_numbers(torch.tensor(10**9 + i), 100) for i in range(400)])
    ordered = drawn.flatten().sort().values
    expected = torch.distributions.Normal(0.0, 1.0).cdf(ordered)
    # Kolmogorov-Smirnov: 1.95 / sqrt(n) is exceeded once in 1,000 times.
    steps = torch.arange(len(ordered), dtype=torch.float64) / len(ordered)
    assert (expected - steps).abs().max() < 1.95 / math.sqrt(len(ordered))
    assert len(drawn.unique()) > 0.999 * drawn.numel()
    for one, two in ((drawn[1:], drawn[:-1]), (drawn[:, 1:], drawn[:, :-1])):
        assert (one * two).mean().abs() < 4 / math.sqrt(one.numel())


def test_random_numbers_equal_those_of_plain_integers():
    for counter in (0, 1, 2**31 + 5, 2**40 + 3):
        found = normal_numbers(torch.tensor(counter), 7).tolist()
        assert found == pytest.approx(loops.normal_numbers(counter, 7), rel=1e-12)


@pytest.mark.parametrize("name", ["elastic-arcface", "elastic-cosface"])
def test_random_margins_depend_on_the_seed_and_not_on_other_draws(name: str):
    x, labels = torch.randn(6, 5), torch.tensor([0, 1, 2, 3, 0, 1])

    def losses(seed: int, draws: int) -> list[float]:
        torch.manual_seed(seed)
        head = MarginSoftmax(5, 4, name)
        with torch.no_grad():
            head.weight.copy_(torch.eye(4, 5))
        found = []
        for _ in range(3):
            torch.rand(draws)
            found.append(head(x, labels).item())
        return found

    assert losses(0, 0) == losses(0, 5)
    assert len({*losses(0, 0), *losses(1, 0)}) == 6


def test_evaluation_uses_the_mean_margin():
    head, x, labels = head_and_batch("elastic-arcface(sigma=0.3)")
    plain = MarginSoftmax(5, 4, "arcface").double()
    plain.load_state_dict(head.state_dict(), strict=False)
    torch.testing.assert_close(head.eval()(x, labels), plain(x, labels))


# --- annealing, smoothing, filtering ---


@pytest.mark.parametrize("spec", ADAPTIVE[:-1])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_margins_are_annealed_and_smoothed(spec: str, smoothing: float):
    """(lambda cos + psi) / (1 + lambda) for all logits; the regularizer is not annealed."""
    head, x, labels = head_and_batch(spec, annealing=Annealing(start=3, rate=1, floor=1), label_smoothing=smoothing)
    margin, cos, norms = head.margin, head.cosines(x), x.norm(dim=1)
    state = {name: head.get_buffer(name).clone() for name in head.state_names}
    whole = F.linear(F.normalize(x), F.normalize(head.weight))
    for step in range(3):
        share = 1 / (1 + max(1.0, 3 / (1 + step)))
        full = apply_margin(whole, labels, margin, norms, scale=1.0, state=state)
        logits = 64 * (cos + share * (full - cos))
        expected = F.cross_entropy(logits, labels, label_smoothing=smoothing)
        if (penalty := margin.penalty(norms)) is not None:
            expected = expected + penalty.mean()
        assert head(x, labels).item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("name", sorted(name for name, kind in registry.items() if kind.unit_weights))
def test_near_duplicates_are_left_out(name: str):
    """The loss is that of the remaining classes, computed in a loop; gradients of the filtered ones are 0."""
    head, x, labels = head_and_batch(name, reduction="none", classes=12, interclass_filtering_threshold=0.2)
    cos = head.cosines(x)
    far = (cos <= 0.2) | F.one_hot(labels, 12).bool()
    assert not far.all()
    found, k = head(x, labels), head.margin.centers()
    noise = loop_options(head, 6)["noise"] or [0.0] * 6
    for i, (row, label) in enumerate(zip(x.tolist(), labels.tolist(), strict=True)):
        classes = [j for j in range(12) if far[i, j]]
        weights = [w for j in classes for w in head.weight[j * k : (j + 1) * k].tolist()]
        options = {"scale": head.scale.fixed, "offset": 0.0 if head.offset is None else head.offset.item()}
        options |= {"state": state_of(head), "noise": [noise[i]]}
        expected = loops.loss_of(head.margin, [row], weights, [classes.index(label)], **options)
        assert found[i].item() == pytest.approx(expected, rel=1e-8)
    (gradient,) = torch.autograd.grad(found[0], head.weight)
    assert gradient.isfinite().all()
    by_class = gradient.unflatten(0, (12, k)).abs().amax((1, 2)) > 0
    assert not by_class[~far[0]].any()
    assert by_class[far[0]].any()


@pytest.mark.parametrize("name", ["arcface", "sphereface2"])
def test_a_threshold_above_all_cosines_changes_nothing(name: str):
    head, x, labels = head_and_batch(name)
    filtered = MarginSoftmax(5, 4, name, interclass_filtering_threshold=1.0).double()
    filtered.load_state_dict(head.state_dict())
    assert torch.equal(filtered(x, labels), head(x, labels))
    assert "interclass_filtering_threshold=1.0" in str(filtered)


def test_all_other_classes_may_be_filtered():
    head = MarginSoftmax(2, 3, "arcface", interclass_filtering_threshold=0.5)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0, 0.0], [1.0, 0.1], [1.0, -0.1]]))
    x = torch.tensor([[1.0, 0.0]], requires_grad=True)
    loss = head(x, torch.tensor([0]))
    loss.backward()
    assert loss.item() == 0
    assert x.grad.isfinite().all()


# --- bad input ---


def _sharded(**options: Any) -> MarginSoftmax:
    return ShardedMarginSoftmax(5, 4, "arcface", **options)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: as_margin("subcenter-arcface(k=0)"),
            "k of subcenter-arcface must be a whole number from 1 to 1000, not 0",
        ),
        (
            lambda: as_margin("subcenter-arcface(k=1000000000000)"),
            "k of subcenter-arcface must be a whole number from 1 to 1000, not 1000000000000",
        ),
        (lambda: as_margin("magface(u_a=1e39)"), "u_a of magface must be in (10, 1e+06], not 1e+39"),
        (lambda: as_margin("magface(l_a=1e39,u_a=1e40)"), "l_a of magface must be in (0, 1e+06), not 1e+39"),
        (lambda: as_margin("subcenter-arcface(k=1.5)"), "k of subcenter-arcface must be a whole number"),
        (lambda: AdaFace(momentum=1.5), "momentum of adaface must be in [0, 1], not 1.5"),
        (lambda: AdaFace(h=0.0), "h of adaface must be positive, not 0.0"),
        (lambda: CurricularFace(momentum=-0.1), "momentum of curricularface must be in [0, 1], not -0.1"),
        (lambda: MagFace(l_a=0.0), "l_a of magface must be in (0, 1e+06), not 0.0"),
        (lambda: MagFace(u_a=5.0), "u_a of magface must be in (10, 1e+06], not 5.0"),
        (lambda: MagFace(u_margin=0.3), "u_margin of magface must be in [0.45, 1.5708), not 0.3"),
        (lambda: MagFace(lambda_g=-1.0), "lambda_g of magface must not be negative, not -1.0"),
        (lambda: ElasticArcFace(sigma=-0.1), "sigma of elastic-arcface must not be negative, not -0.1"),
        (lambda: as_margin("elastic-cosface(m=2)"), "m of elastic-cosface must be in [0, 2), not 2"),
        (lambda: as_margin("combined(m1=0)"), "m1 of combined must be in (0, 1000], not 0"),
        (lambda: as_margin("combined(m2=2)"), "m2 of combined must be in [0, 1.5708), not 2"),
        (lambda: as_margin("uniface(balance=0)"), "balance of uniface must be positive, not 0"),
        (
            lambda: MarginSoftmax(5, 4, "uniface", label_smoothing=0.1),
            "margin 'uniface' does not support label_smoothing (got 0.1)",
        ),
        (
            lambda: MarginSoftmax(5, 4, "arcface", interclass_filtering_threshold=0.0),
            "interclass_filtering_threshold must be in (0, 1], not 0.0",
        ),
        (
            lambda: _sharded(interclass_filtering_threshold=1.5),
            "interclass_filtering_threshold must be in (0, 1], not 1.5",
        ),
        (
            lambda: MarginSoftmax(5, 4, "arcface", label_smoothing=0.1, interclass_filtering_threshold=0.5),
            "interclass_filtering_threshold=0.5 and label_smoothing=0.1 exclude each other",
        ),
    ],
)
def test_bad_input_raises_one_sentence(make: Any, words: str):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the words follow
        make()
    assert words in str(error.value)
    assert "\n" not in str(error.value)


# --- centers ---


def test_the_nearest_center_of_a_class_counts():
    head, x, _ = head_and_batch("subcenter-arcface(k=3)")
    assert head.weight.shape == (12, 5)
    cos = F.linear(F.normalize(x), F.normalize(head.weight)).view(6, 4, 3).amax(2)
    torch.testing.assert_close(head.cosines(x), cos)
    torch.testing.assert_close(head.logits(x), 64 * cos)
    plain = MarginSoftmax(5, 4, "arcface").double()
    assert plain.weight.shape == (4, 5)


@pytest.mark.filterwarnings("ignore")
def test_sub_centers_equal_those_of_pytorch_metric_learning():
    from pytorch_metric_learning.losses import SubCenterArcFaceLoss

    head, x, labels = head_and_batch("subcenter-arcface(m=0.4)", count=20, features=8, classes=6)
    other = SubCenterArcFaceLoss(num_classes=6, embedding_size=8, margin=math.degrees(0.4), scale=64, sub_centers=3)
    with torch.no_grad():
        other.W = torch.nn.Parameter(head.weight.T.clone())
    x.requires_grad_()
    found, expected = head(x, labels), other(x, labels)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(*(torch.autograd.grad(loss, x)[0] for loss in (found, expected)), rtol=1e-4, atol=1e-7)


def test_a_sample_of_classes_has_all_of_their_centers():
    torch.manual_seed(0)
    head = ShardedMarginSoftmax(5, 40, "subcenter-arcface(k=2)", scale=2.0, sample=0.25).double()
    _, weight, _, places = head._used(torch.tensor([0, 7, 39]), torch.tensor([True, True, True]))
    assert weight.shape == (20, 5)
    for place, label in zip(places.tolist(), (0, 7, 39), strict=True):
        assert torch.equal(weight[2 * place : 2 * place + 2], head.weight[2 * label : 2 * label + 2])


def test_combined_margins_contain_the_others():
    cos = torch.linspace(-1, 1, 101, dtype=torch.float64)
    for spec, same in (("m1=1,m2=0,m3=0.35", "am-softmax"), ("m1=2.5,m2=0,m3=0", "a-softmax(m=2.5)")):
        torch.testing.assert_close(as_margin(f"combined({spec})").target(cos), as_margin(same).target(cos))
    near = cos[cos > math.cos(math.pi - 0.5)]
    torch.testing.assert_close(as_margin("combined(m2=0.5,m3=0)").target(near), ArcFace().target(near))


@pytest.mark.parametrize("name", registry)
def test_defaults_are_plain_values(name: str):
    """So that specs and records can have them."""
    assert all(isinstance(value, float | int) for value in dataclasses.asdict(registry[name]()).values())
