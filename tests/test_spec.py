"""The spec grammar: operators print as specs that parse back, and invalid specs raise one clear sentence."""

import dataclasses
import pickle
import time

import numpy as np
import pytest
import torch
from helpers.operators import operator_params
from hypothesis import given
from hypothesis import strategies as st

import dcnet
from dcnet import Learnable, Operator, Radius

positive = st.floats(1e-3, 1e6)
real = st.floats(-1e6, 1e6)
learned = st.builds(Learnable, init=positive, per_channel=st.booleans())
number = st.one_of(real, st.builds(Learnable, init=real, per_channel=st.booleans()))
size = st.one_of(positive, learned)
radius = st.one_of(
    positive,
    st.builds(Radius, init=positive, learnable=st.booleans(), per_channel=st.booleans(), relative=st.booleans()),
)
magnitudes = st.one_of(
    st.builds(dcnet.magnitude.Sphere, scale=size),
    st.builds(dcnet.magnitude.Ball, scale=size, radius=radius),
    st.builds(dcnet.magnitude.Tanh, scale=size, radius=radius),
    st.builds(dcnet.magnitude.Linear, scale=number, learnable=st.booleans()),
    st.builds(dcnet.magnitude.Segmented, scale=number, slope=number, radius=radius, learnable=st.booleans()),
    st.builds(dcnet.magnitude.Log, scale=number),
    st.builds(dcnet.magnitude.Mix, scale=number, log_scale=number),
)
angles = st.one_of(
    st.builds(dcnet.angle.Linear, delta=positive),
    st.just(dcnet.angle.Cosine()),
    st.builds(dcnet.angle.Sigmoid, k=size, learnable=st.booleans()),
    st.just(dcnet.angle.SquareCosine()),
    st.just(dcnet.angle.ReluCosine()),
    st.builds(dcnet.angle.Power, p=st.floats(1, 20)),
    st.builds(dcnet.angle.Spline, segments=st.integers(1, 10).map(lambda half: 2 * half)),
)
sums = st.lists(magnitudes, min_size=2, max_size=4).map(lambda parts: dcnet.magnitude.Sum(tuple(parts)))
operators = st.builds(Operator, st.one_of(magnitudes, sums), angles, st.sampled_from(list(dcnet.weighting.registry)))


@given(op=operators)
def test_specs_round_trip(op):
    again = Operator.parse(str(op))
    assert again == op
    assert hash(again) == hash(op)
    assert str(again) == str(op)
    assert pickle.loads(pickle.dumps(op)) == op


@pytest.mark.parametrize("spec", operator_params())
def test_default_operators_print_as_their_specs(spec):
    assert str(Operator.parse(spec)) == spec


def test_spaces_and_integers_are_accepted():
    assert Operator.parse("ball(radius=.5,scale=1E2)-cos") == Operator(
        dcnet.magnitude.Ball(radius=0.5, scale=100.0), "cos"
    )
    assert Operator.parse(" seg( slope = 1 , scale=2.0) - power(p=3) + joint ") == Operator(
        dcnet.magnitude.Segmented(slope=1.0, scale=2), dcnet.angle.Power(p=3.0), "joint"
    )


def test_plus_builds_sums_of_any_length():
    linear, log, ball = dcnet.magnitude.Linear(), dcnet.magnitude.Log(scale=0.5), dcnet.magnitude.Ball()
    op = Operator((linear + log) + (ball + linear), "cos")
    assert str(op) == "linear&log(scale=0.5)&ball&linear-cos"
    assert Operator("linear&log(scale=0.5)&ball&linear") == op


def test_operators_are_immutable():
    op = Operator.parse("tanh-cos")
    with pytest.raises(AttributeError):
        op.angle = dcnet.angle.Linear()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("tnh-cos", "unknown magnitude 'tnh': known are sphere, ball, tanh, .*; did you mean 'tanh'"),
        ("tanh-cosine", "unknown angle 'cosine': known are linear, cos, .*; did you mean 'cos'"),
        ("tanh-cos+lin", "unknown weighting 'lin': known are unweighted, linear, joint, product"),
        ("xyz-cos", "unknown magnitude 'xyz': known are [a-z, ]*$"),
        ("TANH-cos", "unknown magnitude 'TANH': known are .*; did you mean 'tanh'"),
        ("tanh-po", "unknown angle 'po': known are .*; did you mean 'power'"),
        ("tanh", "invalid operator 'tanh': expected '-', found the end; write magnitude"),
        ("tanh-", "expected the name of an angle, found the end"),
        ("", "expected the name of a magnitude"),
        ("tanh-cos-cos", "unexpected '-' at the end"),
        ("tanh-cos+linear+joint", r"unexpected '\+' at the end"),
        ("tanh(scale=1-cos", "expected ',', found '-'"),
        ("tanh(scale)-cos", r"expected '=', found '\)'"),
        ("tanh(size=1)-cos", "tanh has no 'size', only learnable, scale, radius"),
        ("tanh(scale=1,scale=2)-cos", "'scale' of tanh is given twice"),
        ("tanh(scale=big)-cos", "'big' is not a finite number"),
        ("tanh-cos!", "unexpected '!'"),
        ("tanh&-cos", "expected the name of a magnitude, found '-'"),
        ("conv", "'conv' is torch's own layer"),
        ("tanh(radius=0)-cos", "radius of tanh must be positive, not 0"),
        ("ball(radius=-2.5)-cos", "radius of ball must be positive, not -2.5"),
        ("seg(radius=Radius(init=-1))-cos", "init of a radius must be above 0.0001, not -1"),
        ("seg(radius=Radius(init=0,learnable=False))-cos", "init of a radius must be positive, not 0"),
        ("seg(radius=Radius(decay=1.0))-cos", r"decay of a radius must be in \[0, 1\), not 1.0"),
        ("sphere(scale=0)-cos", "scale of sphere must be positive, not 0"),
        ("ball(scale=-1)-cos", "scale of ball must be positive, not -1"),
        ("tanh(scale=Learnable(init=-1))-cos", "scale of tanh must be positive, not -1"),
        ("tanh(scale=1e-5,learnable=True)-cos", "learned scale of tanh must be above 0.0001, not 1e-05"),
        ("tanh-sigmoid(k=0)", "k of sigmoid must be positive, not 0"),
        ("tanh-sigmoid(k=-0.3)", "k of sigmoid must be positive, not -0.3"),
        ("tanh-power(p=0.5)", "p of power must be 1 or more, not 0.5"),
        ("tanh-spline(segments=3)", "segments of spline must be even, not 3"),
        ("tanh-linear(delta=0)", "delta of linear must be positive, not 0"),
        ("tanh-cos(learnable=True)", "learnable=True needs a constant to learn, but cos has none"),
        (
            "tanh(radius=Radius(decay=0.9))&ball-cos",
            r"a layer has one running mean norm, but .* has the decays \[0.9, 0.999\]",
        ),
        ("tanh(radius=Radius(learnable=2))-cos", "learnable of a radius must be True or False, not 2"),
        ("tanh(scale=True)-cos", "scale of tanh must be a number, not True"),
        ("tanh(radius=Radius(init=True))-cos", "init of a radius must be a number, not True"),
        ("tanh(learnable=2)-cos", "learnable of tanh must be True or False, not 2"),
        ("tanh(scale=Learnable(per_channel=5))-cos", "per_channel of a learned constant must be True or False, not 5"),
        (f"tanh-power(p={10**400})", "p of power must be finite, not an integer of 401 digits"),
        (f"tanh(scale={10**400})-cos", "scale of tanh must be finite, not an integer of 401 digits"),
    ],
)
def test_invalid_specs_raise_one_sentence_with_the_value(spec, message):
    with pytest.raises(ValueError, match=message) as caught:
        Operator.parse(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("linear&" * 200_000 + "linear-cos", "a spec must have at most 5000 characters, not 1400010: 'linear&linear"),
        ("tanh(radius=" + "Radius(init=" * 300 + "1" + ")" * 301 + "-cos", "'init' of Radius must be a number"),
        ("tanh(scale=Learnable(init=Radius()))-cos", "'init' of Learnable must be a number, True or False, not Radius"),
        ("(" * 4999, "expected the name of a magnitude, found"),
        ("linear(scale=" + "9" * 4900 + ")-cos", "is not a finite number"),
        ("a" * 4999, "unknown magnitude 'aaa"),
    ],
    ids=["many parts", "deeply nested", "nested", "parentheses", "digits", "one name"],
)
def test_malicious_specs_are_rejected_quickly(spec, message):
    before = time.perf_counter()
    with pytest.raises(ValueError, match=message) as caught:
        Operator.parse(spec)
    assert len(str(caught.value)) < 1000
    assert time.perf_counter() - before < 5


@pytest.mark.parametrize("value", ["-" * 4900 + "1", "(" * 4900, "[" * 180 + "]" * 180, "9" * 200_000])
def test_malicious_margins_are_rejected(value):
    with pytest.raises(ValueError, match="arcface") as caught:
        dcnet.losses.MarginSoftmax(4, 3, f"arcface(m={value})")
    assert len(str(caught.value)) < 1000


def test_two_nested_values():
    spec = "tanh(scale=Learnable(init=2.0),radius=Radius(init=3.0))-cos"
    assert str(Operator.parse(spec)) == spec


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Operator.parse(3), "an operator is an Operator or a spec such as 'tanh-cos', not 3"),
        (lambda: Operator(3, "cos"), "a magnitude is a Magnitude, its name or a function of the norm, not 3"),
        (lambda: Operator("tanh", 3), "an angle is an Angle, its name or a function of the cosine, not 3"),
        (lambda: Operator("tanh", "cos", 3), "a weighting is one of unweighted, .*, not 3"),
        (lambda: Operator(dcnet.magnitude.Tanh, "cos"), "a magnitude is a Magnitude"),
        (lambda: dcnet.magnitude.Tanh(scale="1"), "scale of tanh must be a number, not '1'"),
        (lambda: dcnet.magnitude.Tanh(scale=True), "scale of tanh must be a number, not True"),
        (lambda: dcnet.magnitude.Tanh(scale=Radius()), "scale of tanh must be a number or a Learnable, not Radius"),
        (
            lambda: dcnet.magnitude.Tanh(radius=Learnable()),
            "radius of tanh must be a number or a Radius, not Learnable",
        ),
        (lambda: dcnet.magnitude.Tanh() + 3, "unsupported operand"),
        (lambda: Radius(init="1"), "init of a radius must be a number, not '1'"),
    ],
)
def test_wrong_types_raise_one_sentence_with_the_value(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_numpy_numbers_become_python_numbers():
    for number in (np.float64(2.0), np.float32(2.0), np.int64(2)):
        op = Operator(dcnet.magnitude.Tanh(scale=number, radius=Radius(init=number)), dcnet.angle.Sigmoid(k=number))
        assert Operator.parse(str(op)) == op
        assert "np." not in str(op)


def test_dataclasses_replace_changes_an_operator():
    op = dataclasses.replace(Operator.parse("tanh-cos"), weighting="joint")
    assert str(op) == "tanh-cos+joint"


def test_invalid_combinations_are_rejected():
    with pytest.raises(ValueError, match=r"'tanh-sqcos' is more than a magnitude: use dcnet.Operator.parse"):
        Operator("tanh-sqcos")
    with pytest.raises(ValueError, match="a sum of magnitudes needs at least one part"):
        dcnet.magnitude.Sum(())
    with pytest.raises(ValueError, match=r"'mix\(scale=0\)-cos\+product' divides by the scale"):
        Operator.parse("mix(scale=0)-cos+product")
    with pytest.raises(TypeError, match="has parameters or buffers, which no layer would own"):
        Operator("linear", torch.nn.PReLU())


def test_infinite_constants_are_rejected():
    with pytest.raises(ValueError, match="scale of log must be finite, not inf"):
        dcnet.magnitude.Log(scale=float("inf"))
    with pytest.raises(ValueError, match="radius of tanh must be finite, not nan"):
        dcnet.magnitude.Tanh(radius=float("nan"))
