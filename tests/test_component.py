"""Magnitudes, angles and weightings: values computed by hand, properties, and custom components."""

import math
import types
import typing
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dcnet
from dcnet.component import belongs_to, constant

# h at n = 0.5 and n = 3 with rho = 1: the numbers of Eq. 4 to 10 with the default constants.
MAGNITUDES = {
    "sphere": (1.0, 1.0),
    "ball": (0.5, 1.0),
    "tanh": (0.46211715726, 0.99505475369),
    "linear": (0.5, 3.0),
    "seg": (0.5, 2.0),
    "log": (0.40546510811, 1.38629436112),
    "mix": (0.90546510811, 4.38629436112),
    "sharp": (0.69444444444, 0.93652445369),
}

# g at theta = 0, pi/3, pi/2 and pi: the numbers of Eq. 11 to 14 with the default constants.
ANGLES = {
    "linear": (1.0, 1 / 3, 0.0, -1.0),
    "cos": (1.0, 0.5, 0.0, -1.0),
    "sigmoid": (1.0, 0.71024464313, 0.0, -1.0),
    "sqcos": (1.0, 0.25, 0.0, -1.0),
    "relucos": (1.0, 0.5, 0.0, 0.0),
    "power": (1.0, 0.25, 0.0, -1.0),
    "spline": (1.0, 0.5, 0.0, -1.0),
}


def test_expected_values_cover_the_registries():
    assert set(MAGNITUDES) == set(dcnet.magnitude.registry)
    assert set(ANGLES) == set(dcnet.angle.registry)


@pytest.mark.parametrize("name", MAGNITUDES)
def test_magnitude_values(name):
    op = dcnet.Operator(name, "cos")
    h = op.h(torch.tensor([0.5, 3.0], dtype=torch.float64), op.constants({}))
    assert h.tolist() == pytest.approx(MAGNITUDES[name], abs=1e-10)


@pytest.mark.parametrize("name", ANGLES)
def test_angle_values(name):
    op = dcnet.Operator("sphere", name)
    cos = torch.tensor([0.0, math.pi / 3, math.pi / 2, math.pi], dtype=torch.float64).cos()
    assert op.g(cos, op.constants({})).tolist() == pytest.approx(ANGLES[name], abs=1e-7)


@given(angle=st.sampled_from(list(ANGLES)), k=st.floats(0.02, 20), p=st.floats(1, 10))
def test_angles_decrease_from_one_and_are_bounded_by_one(angle, k, p):
    given_constants = {"sigmoid": {"k": k}, "power": {"p": p}}.get(angle, {})
    op = dcnet.Operator("sphere", dcnet.angle.registry[angle](**given_constants))
    g = op.g(torch.linspace(0, math.pi, 200, dtype=torch.float64).cos(), op.constants({}))
    assert g[0].item() == pytest.approx(1)
    assert g.abs().max() <= 1 + 1e-12
    assert (g.diff() <= 1e-12).all()


@given(raw=st.lists(st.floats(-3, 3), min_size=7, max_size=7))
def test_spline_is_monotone_bounded_and_zero_at_a_right_angle_for_any_slopes(raw):
    op = dcnet.Operator("sphere", dcnet.angle.Spline(segments=6))
    constants = op.constants({"slopes": torch.tensor(raw, dtype=torch.float64)})
    cos = torch.linspace(-1, 1, 201, dtype=torch.float64)
    g = op.g(cos, constants)
    assert (g.diff() > 0).all()
    assert g.abs().max().item() == pytest.approx(1)
    assert op.g(torch.zeros(1, dtype=torch.float64), constants).item() == 0


def test_spline_has_its_full_slope_at_knots():
    """The cosine is at a knot in every zero patch; both adjacent segments contribute to the slope."""
    op = dcnet.Operator("sphere", "spline")
    cos = torch.linspace(-1, 1, 9, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(op.g(cos, op.constants({})).sum(), cos)
    torch.testing.assert_close(slope, torch.ones_like(slope))


def test_spline_learns_relu_and_square_cosine():
    """The "one single function" of Section 5 can approximate both."""
    for target in ("relucos", "sqcos"):
        op, wanted = dcnet.Operator("sphere", "spline"), dcnet.Operator("sphere", target)
        slopes = op.slots["slopes"].initial(1).double().requires_grad_()
        optimizer = torch.optim.Adam([slopes], lr=0.05)
        cos = torch.linspace(-1, 1, 101, dtype=torch.float64)
        for _ in range(300):
            loss = (op.g(cos, op.constants({"slopes": slopes})) - wanted.g(cos, {})).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert loss.item() < 1e-3, target


@pytest.mark.parametrize("k", [1e-3, 1e-2, 100.0])
def test_sigmoid_does_not_overflow(k):
    op = dcnet.Operator("sphere", dcnet.angle.Sigmoid(k=k))
    cos = torch.linspace(-1, 1, 9, requires_grad=True)
    g = op.g(cos, op.constants({}))
    g.sum().backward()
    assert g.isfinite().all()
    assert cos.grad.isfinite().all()


PAPER = ["sphere", "ball", "tanh", "linear", "seg", "log", "mix"]


def test_properties_match_the_paper():
    bounded = {name: dcnet.Operator(name, "cos").properties().bounded for name in PAPER}
    assert bounded == {
        "sphere": True,
        "ball": True,
        "tanh": True,
        "linear": False,
        "seg": False,
        "log": False,
        "mix": False,
    }
    smooth = {name: dcnet.Operator(name, "cos").properties().smooth for name in PAPER}
    assert [name for name, value in smooth.items() if not value] == ["ball", "seg"]
    radius = {name: dcnet.Operator(name, "cos").properties().radius for name in PAPER}
    assert [name for name, value in radius.items() if value == dcnet.Radius()] == ["ball", "tanh", "seg"]
    assert [name for name, value in radius.items() if value is None] == ["sphere", "linear", "log", "mix"]


def test_properties_of_weighted_summed_and_custom_operators():
    def properties(spec):
        return dcnet.Operator.parse(spec).properties()

    assert properties("tanh(scale=2.0)-cos").bound == 2.0
    assert properties("tanh(scale=2.0)-cos+joint").bound == 2.0
    assert properties("tanh(scale=2.0)-cos+product").bound == 2.0
    assert (properties("tanh-cos+linear").bounded, properties("tanh-cos+linear").bound) == (False, None)
    assert properties("tanh(scale=2.0)&sphere-cos").bound == 3.0
    assert properties("tanh(scale=2.0)&sphere-cos+product").bound == 9.0
    assert properties("tanh&ball-cos").smooth is False
    assert properties("tanh&log-cos").bounded is False
    assert properties("seg(slope=0,scale=0.5,radius=4.0)-cos").bound == 2.0
    assert (properties("seg(slope=0)-cos").bounded, properties("seg(slope=0)-cos").bound) == (True, None)
    assert (properties("tanh(learnable=True)-cos").bounded, properties("tanh(learnable=True)-cos").bound) == (
        True,
        None,
    )
    assert properties("tanh-relucos").smooth is False
    assert properties("seg(scale=-1,slope=0,radius=1.0)-cos+product").bound == 1.0
    assert properties("ball(radius=2.0)&tanh(radius=3.0)-cos").radius == (2.0, 3.0)
    own = dcnet.Operator(lambda n: n.sqrt(), "cos").properties()
    assert (own.bounded, own.bound, own.smooth) == (None, None, None)
    own = dcnet.Operator("tanh", lambda c: 5 * c).properties()
    assert (own.bounded, own.bound) == (None, None)


def test_equations_as_text():
    assert dcnet.Operator.parse("seg(slope=0.2)-sqcos+linear").properties().equation == (
        "f(w, x) = ||w|| (beta ||x|| + (alpha - beta) min(||x||, rho)) sign(cos(theta)) cos(theta)^2, "
        "alpha = 1, beta = 0.2, rho = 1 x mean ||x|| (learned per channel)"
    )
    assert dcnet.Operator.parse("tanh(radius=2.0)-sigmoid(learnable=True)+product").properties().equation == (
        "f(w, x) = alpha tanh(||w|| / rho) alpha tanh(||x|| / rho) / alpha coth(pi / 4k) tanh((pi/2 - theta) / 2k), "
        "alpha = 1, rho = 2, k = 0.3 (learned)"
    )
    assert dcnet.Operator.parse("sharp-power(p=3)").properties().equation == (
        "f(w, x) = (||x|| / (||x|| + q))^2 sign(cos(theta)) |cos(theta)|^3, q = 0.1"
    )
    assert dcnet.Operator.parse("linear-cos").properties().equation == "f(w, x) = alpha ||x|| cos(theta), alpha = 1"


@dataclass(frozen=True)
class TwoRadii(dcnet.magnitude.Magnitude):
    name: typing.ClassVar[str] = "two"
    equation: typing.ClassVar[str] = "two({n}, {inner}, {outer})"
    inner: typing.Any = constant(dcnet.Radius(), "rho", positive=True)
    outer: typing.Any = constant(dcnet.Radius(init=2.0), "sigma", positive=True)

    def value(self, n, inner, outer):
        return torch.tanh(n / inner) + torch.tanh(n / outer)


def test_radius_field_can_have_any_name(registered):
    from dcnet.testing import assert_decoupled

    registered(dcnet.magnitude, TwoRadii)
    op = dcnet.Operator.parse("two-cos")
    assert op.properties().radius == (dcnet.Radius(), dcnet.Radius(init=2.0))
    assert op.decay == 0.999
    assert_decoupled(dcnet.DecoupledConv2d(4, 6, 3, operator=op))


@dataclass(frozen=True)
class Halved(dcnet.angle.Angle):
    name: typing.ClassVar[str] = "halved"
    equation: typing.ClassVar[str] = "{scale} cos(theta)"
    scale: typing.Any = constant(0.5, "s")

    def value(self, cos, scale):
        return scale * cos


def test_scale_of_an_angle_is_separate_from_that_of_the_magnitude(registered):
    registered(dcnet.angle, Halved)
    op = dcnet.Operator("sharp", "halved", "product")
    assert op.properties().bound == 1.0
    x, w = torch.randn(5, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    y = dcnet.functional.decoupled_linear(x, w, operator=op)
    torch.testing.assert_close(y, dcnet.functional.decoupled_linear(x, w, operator="sharp-cos+product") / 2)


@dataclass(frozen=True)
class Clash(dcnet.magnitude.Magnitude):
    name: typing.ClassVar[str] = "clash"
    equation: typing.ClassVar[str] = "{weight}"
    weight: typing.Any = constant(1.0, "a")

    def value(self, n, weight):
        return weight * n


def test_constant_named_like_an_attribute_of_layers_is_rejected():
    op = dcnet.Operator(Clash(learnable=True), "cos")
    with pytest.raises(ValueError, match="has a constant named 'weight', which layers use: rename it"):
        dcnet.DecoupledLinear(4, 3, operator=op)


@pytest.fixture
def registered():
    """Registers a component until the end of the test."""
    entered = []

    def enter(module, part):
        module.register(part)
        entered.append((module, part.name))

    yield enter
    for module, name in entered:
        del module.registry[name]


@dataclass(frozen=True)
class OwnRoot(dcnet.magnitude.Magnitude):
    """h(n) = alpha * sqrt(n), as a user would add it."""

    name: typing.ClassVar[str] = "own_root"
    equation: typing.ClassVar[str] = "{scale} sqrt({n})"
    scale: typing.Any = constant(1.0, "alpha")

    def value(self, n, scale):
        return scale * n.sqrt()


def test_registered_magnitude_works_in_specs_equations_and_layers(registered):
    from dcnet.testing import assert_decoupled

    registered(dcnet.magnitude, OwnRoot)
    op = dcnet.Operator.parse("own_root(scale=Learnable(init=2.0,per_channel=True))-sigmoid+product")
    assert dcnet.Operator.parse(str(op)) == op
    assert "sqrt(||x||)" in op.properties().equation
    assert_decoupled(dcnet.DecoupledConv2d(4, 6, 3, operator=op))
    with pytest.raises(ValueError, match="'own_root' is taken: OwnRoot is a magnitude of that name"):
        dcnet.magnitude.register(OwnRoot)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("linear", "'linear' is taken: LinearlyWeighted is a weighting of that name"),
        ("own-one", "the name of a weighting must be one word of letters, digits and _, not 'own-one'"),
    ],
)
def test_weighting_with_a_taken_or_invalid_name_is_rejected(given, says):
    class Own(dcnet.weighting.Weighting):
        name = given
        equation = "{x}"

    with pytest.raises(ValueError, match=says):
        dcnet.weighting.register(Own)


def test_custom_angles_get_cosines_of_at_most_one():
    weight = torch.randn(200, 9, generator=torch.Generator().manual_seed(0))
    operator = dcnet.Operator("sphere", lambda cos: torch.acos(cos))
    found = dcnet.functional.decoupled_linear(weight, weight, operator=operator, eps=0.0)
    assert found.isfinite().all()


JAVASCRIPT = types.SimpleNamespace(
    **{name: getattr(math, name) for name in ("tanh", "log1p", "cos", "pow")},
    **{"min": min, "max": max, "abs": abs, "PI": math.pi, "sign": lambda value: math.copysign(value != 0, value)},
)


@pytest.mark.parametrize("name", dcnet.magnitude.registry)
def test_javascript_of_a_magnitude_matches_its_value(name):
    part = dcnet.magnitude.registry[name]()
    constants = {own: 0.3 * low + 0.7 * high for own, (low, high) in part.limits().items()}
    assert set(constants) == set(part.slots())
    for n in (0.1, 1.0, 2.5):
        found = eval(part.script(), {"Math": JAVASCRIPT, "n": n, **constants})
        assert found == pytest.approx(part.value(torch.tensor(n, dtype=torch.float64), **constants).item())


@pytest.mark.parametrize("name", sorted(set(dcnet.angle.registry) - {"spline"}))
def test_javascript_of_an_angle_matches_its_value(name):
    part = dcnet.angle.registry[name]()
    constants = {own: 0.3 * low + 0.7 * high for own, (low, high) in part.limits().items()}
    for theta in (0.2, 1.0, 2.0, 3.0):
        found = eval(part.script(), {"Math": JAVASCRIPT, "theta": theta, **constants})
        cos = torch.tensor(theta, dtype=torch.float64).cos()
        assert found == pytest.approx(part.value(cos, **constants).item())


def test_subclass_with_another_equation_does_not_inherit_forms_of_the_old_one():
    class Doubled(dcnet.magnitude.Tanh):
        def value(self, n, scale, radius):
            return 2 * super().value(n, scale, radius)

    assert dcnet.magnitude.Tanh().script() is not None
    assert Doubled().script() is None
    assert dcnet.angle.Spline().script() is None
    for name in ("slopes", "linear_slope", "device", "javascript"):
        assert belongs_to(dcnet.magnitude.Tanh(), name, "value")
        assert not belongs_to(Doubled(), name, "value")


def test_division_by_radii_equals_the_quotient():
    n, radius = torch.rand(4, 1, 3, 3, dtype=torch.float64) + 0.1, torch.rand(5, 1, 1, dtype=torch.float64) + 0.1
    radius.requires_grad_()
    n.requires_grad_()
    found = dcnet.magnitude._over(n, radius)
    torch.testing.assert_close(found, n / radius)
    gradients = [torch.autograd.grad(each.square().sum(), (n, radius)) for each in (found, n / radius)]
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two)
