"""Margins compared with loops and another library, at extreme angles, and as specs."""

import dataclasses
import json
import math
from fractions import Fraction
from typing import ClassVar

import numpy as np
import pytest
import torch
from helpers.heads_and_batches import head_and_batch, loop_options
from helpers.margins_in_loops import loss_of, psi
from hypothesis import given
from hypothesis import strategies as st

import dcnet
from dcnet.cli.app import main
from dcnet.losses import (
    AdaFace,
    AMSoftmax,
    Annealing,
    ArcFace,
    ASoftmax,
    Automatic,
    CombinedMargin,
    CurricularFace,
    ElasticArcFace,
    LSoftmax,
    MagFace,
    Margin,
    MarginSoftmax,
    ShardedMarginSoftmax,
    SphereFace2,
    SphereFaceR,
    SubCenterArcFace,
    UniFace,
    aliases,
    as_margin,
    register,
    registry,
)
from dcnet.losses.annealing import AnyAnnealing
from dcnet.losses.cosine_margins import CHEBYSHEV, monotone_cosine
from dcnet.training.adversarial import as_adversary
from dcnet.training.recipes import recipe

MARGINS = [
    *(kind() for kind in registry.values()),
    *(ASoftmax(m) for m in (1, 2, 3, 1.35, 2.5)),
    LSoftmax(m=3.3),
    SphereFaceR(version=2, detach=False),
    SphereFaceR(m=2.2, detach=False),
    CombinedMargin(m1=1.7, m2=0.4, m3=0.1),
    UniFace(m=0.2, balance=0.3),
    SubCenterArcFace(k=1),
    # With statistics and limits near the norms of the batches of these tests, so that they matter.
    AdaFace(h=2.0, momentum=0.5),
    MagFace(l_a=1.5, u_a=3.0),
    CurricularFace(m=0.3, momentum=1.0),
    ElasticArcFace(sigma=0.4),
]


def in_loops(head, x, labels):
    return loss_of(head.margin, x.tolist(), labels=labels.tolist(), **loop_options(head, len(x)))


@pytest.mark.parametrize("margin", MARGINS, ids=str)
def test_losses_match_the_papers(margin):
    for seed in range(3):
        head, x, labels = head_and_batch(margin, seed=seed)
        assert head(x, labels).item() == pytest.approx(in_loops(head, x, labels), rel=1e-9)


@pytest.mark.parametrize("margin", MARGINS, ids=str)
def test_losses_of_features_that_point_away_from_their_class(margin):
    """Beyond pi - m, where an additive angular margin has another formula."""
    head, x, labels = head_and_batch(margin)
    x = -head.weight[labels * head.margin.centers()].detach() + 0.02 * x
    if head.margin.centers() == 1:
        assert head.cosines(x).gather(1, labels[:, None]).max() < math.cos(math.pi - 0.3)
    assert head(x, labels).item() == pytest.approx(in_loops(head, x, labels), rel=1e-8)


EXACT = [margin for margin in MARGINS if not getattr(margin, "detach", False) and not isinstance(margin, AdaFace)]


@pytest.mark.parametrize("margin", EXACT, ids=str)
def test_gradients(margin):
    head, x, labels = head_and_batch(margin)
    # In evaluation, since training changes the state of a margin.
    head.eval()
    x.requires_grad_()
    inputs = (x, *head.parameters())
    assert torch.autograd.gradcheck(lambda x, *_: head(x, labels), inputs, atol=1e-6)


@pytest.mark.parametrize("margin", [margin for margin in MARGINS if isinstance(margin, AdaFace)], ids=str)
def test_gradients_of_adaface_are_those_for_constant_norms(margin):
    head, x, labels = head_and_batch(margin)
    head.eval().get_buffer("norm_mean").fill_(2.0)
    head.get_buffer("norm_deviation").fill_(0.8)
    norms = x.norm(dim=1, keepdim=True)
    x.requires_grad_()
    inputs = (x, *head.parameters())
    assert torch.autograd.gradcheck(lambda x, *_: head(x * norms / x.norm(dim=1, keepdim=True), labels), inputs)


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
    assert monotone_cosine(cos, m).item() == pytest.approx(psi(theta, m), abs=1e-6)


@given(m=st.floats(1, 8))
def test_psi_decreases_without_jumps(m):
    theta = torch.linspace(0, math.pi, 4001, dtype=torch.float64)
    found = monotone_cosine(theta.cos(), m)
    steps = found.diff()
    assert steps.max() <= 1e-9
    assert steps.min() >= -1.01 * m * math.pi / 4000
    assert found[0].item() == pytest.approx(1)


@pytest.mark.parametrize("name", registry)
def test_targets_are_below_the_cosine_and_decrease(name):
    margin, theta = as_margin(name), torch.linspace(0, math.pi, 2001, dtype=torch.float64)
    target, others = margin.target(theta.cos()), margin.others(theta.cos())
    assert (target <= others + 1e-12).all()
    assert (target.diff() <= 1e-12).all()


ENDS = [0.0, math.pi, math.pi / 2, *(k * math.pi / 4 for k in (1, 3)), *(k * math.pi / 3 for k in (1, 2)), 1e-4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("margin", MARGINS, ids=str)
def test_losses_and_gradients_are_finite_everywhere(margin, dtype):
    """At theta = 0, pi and the ends of intervals, for zero, huge and tiny features, in half precision."""
    head = MarginSoftmax(2, 3, margin, annealing=None)
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    with torch.no_grad():
        head.weight.copy_(rows.repeat_interleave(head.margin.centers(), 0))
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


@pytest.mark.parametrize("name", registry)
def test_autocast_changes_nothing(name):
    # In evaluation, since training changes the state of a margin.
    head = MarginSoftmax(64, 20, name).eval()
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
def test_losses_equal_those_of_pytorch_metric_learning(margin, theirs, options):
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
def test_specs_round_trip(margin):
    assert as_margin(str(margin)) == margin


def test_specs_are_short():
    assert str(ASoftmax()) == "a-softmax"
    assert str(ASoftmax(m=2)) == "a-softmax(m=2)"
    assert as_margin("sphereface-r(m=2.0, version=2)") == SphereFaceR(m=2.0, version=2)


MEANT = {
    "sphereface": "a-softmax",
    "SphereFace": "a-softmax",
    "cosface": "am-softmax",
    "CosFace": "am-softmax",
    "AM_Softmax": "am-softmax",
    "amsoftmax": "am-softmax",
    "ArcFace": "arcface",
    "aam-softmax": "arcface",
    "L Softmax": "l-softmax",
    "large-margin-softmax": "l-softmax",
    "modified-softmax": "m-softmax",
    "normalized_softmax": "normface",
    "l2-constrained-softmax": "l2-softmax",
    "SphereFaceR": "sphereface-r",
    "sphereface-revived": "sphereface-r",
    "SphereFace-2": "sphereface2",
    "SubCenterArcFace": "subcenter-arcface",
    "ElasticFace": "elastic-arcface",
    "elasticface_cos": "elastic-cosface",
    "UCE": "uniface",
}


@pytest.mark.parametrize(("typed", "name"), MEANT.items())
def test_aliases_and_spellings_give_the_margin(typed: str, name: str):
    assert as_margin(typed) == as_margin(name)
    assert str(as_margin(typed)) == name


@pytest.mark.parametrize("name", registry)
def test_the_class_name_is_an_alias(name: str):
    assert as_margin(registry[name].__name__) == registry[name]()


def test_every_alias_belongs_to_one_margin():
    assert set(aliases.values()) <= set(registry)
    assert not set(aliases) & set(registry)
    assert {str(as_margin(alias)) for alias in aliases} == set(aliases.values())


@pytest.mark.parametrize("head", [MarginSoftmax, ShardedMarginSoftmax])
def test_heads_accept_aliases_with_parameters(head: type[MarginSoftmax]):
    assert str(head(5, 4, "CosFace(m=0.2)").margin) == "am-softmax(m=0.2)"


def test_a_config_has_the_registered_name():
    configs = [recipe("features", margin=spec) for spec in ("am-softmax(m=0.2)", "cosface(m=0.2)", "CosFace(m=1/5)")]
    assert {config.margin for config in configs} == {"am-softmax(m=0.2)"}
    assert len({config.hash for config in configs}) == len({config.name for config in configs}) == 1


def test_the_command_line_lists_aliases(capsys: pytest.CaptureFixture[str]):
    assert main(["list", "margins", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == set(registry)
    assert rows["am-softmax"]["aliases"][0] == "cosface"
    assert rows["a-softmax"]["aliases"][0] == "sphereface"
    assert main(["list", "margins"]) == 0
    assert "cosface" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("cosfac", "unknown margin 'cosfac'"),
        ("cosfac", "did you mean 'cosface'?"),
        ("cosface(m='a')", "invalid margin \"cosface(m='a')\": m of am-softmax must be a number, not 'a'"),
        ("CosFace(s=3)", "invalid margin 'CosFace(s=3)': CosFace has no 's', only m"),
    ],
)
def test_errors_quote_what_was_typed(spec: str, words: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the words follow
        as_margin(spec)
    assert words in str(error.value)
    assert main(["train", "--margin", spec]) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert words in message


def test_a_name_that_is_taken_is_rejected():
    @dataclasses.dataclass(frozen=True)
    class Own(Margin):
        name: ClassVar[str] = "own"
        aliases: ClassVar[tuple[str, ...]] = ("mine", "cosface")
        about: ClassVar[str] = "s cos(theta_y)"

    with pytest.raises(ValueError, match="'cosface' is taken: AMSoftmax is a margin of that name"):
        register(Own)
    assert "own" not in registry
    Own.aliases = ("mine",)
    try:
        register(Own)
        assert as_margin("Mine") == Own()
        with pytest.raises(ValueError, match="'own' is taken: Own is"):
            register(Own)
    finally:
        del registry["own"]
    assert "mine" not in registry


WRONG = [
    ("arcface(m=True)", "invalid margin 'arcface(m=True)': m of arcface must be a number, not True"),
    ("arcface(m='a')", "m of arcface must be a number, not 'a'"),
    ("a-softmax(m=[2])", "invalid margin 'a-softmax(m=[2])': unexpected '['"),
    ("sphereface2(share='a')", "share of sphereface2 must be a number, not 'a'"),
    ("sphereface2(share=True)", "share of sphereface2 must be a number, not True"),
    ("sphereface2(t=None)", "t of sphereface2 must be a number, not None"),
    ("sphereface-r(detach='no')", "detach of sphereface-r must be True or False, not 'no'"),
    ("sphereface-r(detach=0)", "detach of sphereface-r must be True or False, not 0"),
    ("sphereface-r(version=True)", "version of sphereface-r must be 1 or 2, not True"),
    ("a-softmax(m=4,m=3)", "invalid margin 'a-softmax(m=4,m=3)': 'm' of a-softmax is given twice"),
    ("a-softmax(m=4,m=4)", "'m' of a-softmax is given twice"),
    (
        "arcface(0.3)",
        "invalid margin 'arcface(0.3)': expected the name of a value, found '0.3'; write 'arcface' or",
    ),
    ("a-softmax(m=4)(m=3)", "unexpected '(' at the end; write 'a-softmax' or a-softmax(name=number,...)"),
    ("a-softmax(m={[]: 1})", "unexpected '{'; write"),
    (f"a-softmax(m=1{'0' * 400})", "m of a-softmax must be finite, not an integer of 401 digits"),
    (f"a-softmax(m=1{'0' * 400}/3)", "invalid margin"),
]


@pytest.mark.parametrize(("spec", "words"), WRONG, ids=[spec[:30] for spec, _ in WRONG])
def test_invalid_specs_are_rejected(spec: str, words: str):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the words follow
        as_margin(spec)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("spec", ["arcface(m=True)", "sphereface2(share='a')", "sphereface-r(detach='no')"])
def test_the_command_line_reports_invalid_specs(spec: str, capsys: pytest.CaptureFixture[str]):
    assert main(["train", "--margin", spec]) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert "invalid margin" in message


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("fgsm(epsilon='a')", "epsilon of fgsm, for pixels in [0, 1], must be a number, not 'a'"),
        ("pgd(steps=3,steps=4)", "'steps' of pgd is given twice"),
    ],
)
def test_invalid_adversaries_are_rejected(spec: str, words: str):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the words follow
        as_adversary(spec)
    assert words in str(error.value)


def test_an_empty_name_has_no_suggestion():
    with pytest.raises(ValueError, match="unknown margin ''") as error:
        as_margin("")
    assert "did you mean" not in str(error.value)


def test_a_wrong_type_raises_type_error():
    with pytest.raises(TypeError, match="detach of sphereface-r must be True or False, not 'no'"):
        SphereFaceR(detach="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="share of sphereface2 must be a number"):
        SphereFace2(share="a")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("margin", "spec"),
    [
        (ArcFace(m=np.float64(0.3)), "arcface(m=0.3)"),
        (ASoftmax(m=np.int64(2)), "a-softmax(m=2)"),
        (AMSoftmax(m=Fraction(1, 4)), "am-softmax(m=0.25)"),  # type: ignore[arg-type]
        (SphereFaceR(version=np.int32(2)), "sphereface-r(version=2)"),
        (SphereFace2(t=np.float64(2.5), share=np.float64(0.6)), "sphereface2(t=2.5,share=0.6)"),
        (ArcFace(m=np.float64(0.5)), "arcface"),
    ],
    ids=str,
)
def test_numpy_numbers_print_as_plain_ones(margin, spec: str):
    assert str(margin) == spec
    assert as_margin(spec) == margin


CLASSES, SCALES = (2, 3, 4, 10, 1000), (1.0, 40.0, 64.0, 1000.0)


def pulls(
    margin: SphereFace2, classes: int, scale: float, annealing: AnyAnnealing | None = None
) -> tuple[float, float]:
    """The gradient of the loss with respect to the bias, for orthogonal weights, and the part of the label."""
    head = MarginSoftmax(3, classes, margin, scale=scale, annealing=annealing).double().eval()
    head.reset_parameters()
    with torch.no_grad():
        head.weight.copy_(torch.eye(3, dtype=torch.float64)[:1].expand(classes, 3))
    feature = torch.eye(3, dtype=torch.float64)[2:]
    assert head.offset is not None
    (gradient,) = torch.autograd.grad(head(feature, torch.tensor([0])), head.offset)
    zero = torch.zeros((), dtype=torch.float64)
    label = scale * head.first_share * margin.target(zero) + head.offset
    return gradient.item(), (margin.share / scale * torch.sigmoid(-label)).item()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.7, 0.99])
@pytest.mark.parametrize("m", [0.0, 0.4, 0.9])
def test_the_first_bias_balances_label_and_others_for_all_settings(m: float, share: float):
    for classes in CLASSES:
        for scale in SCALES:
            gradient, of_label = pulls(SphereFace2(m=m, share=share), classes, scale)
            assert of_label > 0, (classes, scale)
            assert abs(gradient) < 1e-6 * of_label, (classes, scale)


@pytest.mark.parametrize("annealing", [Annealing(), Annealing(start=3, rate=1, floor=1), Automatic()], ids=str)
def test_the_first_bias_accounts_for_annealing(annealing: AnyAnnealing):
    for classes in CLASSES:
        gradient, of_label = pulls(SphereFace2(), classes, 40.0, annealing)
        assert abs(gradient) < 1e-6 * of_label, classes


def test_the_first_bias_is_finite_for_few_classes_and_large_scales():
    assert MarginSoftmax(8, 2, "sphereface2", scale=64.0).offset.isfinite()
    assert MarginSoftmax(8, 3, "sphereface2(m=0.9)").offset.isfinite()
    # Two classes of equal weight: the bias is in the middle.
    margin = SphereFace2(m=0.9, share=0.5)
    assert margin.first_bias(2, 1000.0) == pytest.approx(750.0)
