"""Margins as they are typed in: what is wrong is told in one sentence, and what is printed can be typed in."""

from fractions import Fraction

import numpy as np
import pytest

from dcnet.cli.app import main
from dcnet.losses import AMSoftmax, ArcFace, ASoftmax, SphereFace2, SphereFaceR, as_margin
from dcnet.training.adversaries import as_adversary

WRONG = [
    ("arcface(m=True)", "'arcface(m=True)' is no margin: m of arcface must be a number, not True"),
    ("arcface(m='a')", "is no margin: m of arcface must be a number, not 'a'"),
    ("a-softmax(m=[2])", "is no margin: m of a-softmax must be a number, not [2]"),
    ("sphereface2(share='a')", "is no margin: share of sphereface2 must be a number, not 'a'"),
    ("sphereface2(share=True)", "is no margin: share of sphereface2 must be a number, not True"),
    ("sphereface2(t=None)", "is no margin: t of sphereface2 must be a number, not None"),
    ("sphereface-r(detach='no')", "is no margin: detach of sphereface-r must be True or False, not 'no'"),
    ("sphereface-r(detach=0)", "is no margin: detach of sphereface-r must be True or False, not 0"),
    ("sphereface-r(version=True)", "version of sphereface-r must be 1 or 2, not True"),
    ("a-softmax(m=4,m=3)", "'m' of a-softmax is given 2 times in 'a-softmax(m=4,m=3)': give it once"),
    ("a-softmax(m=4,m=4)", "'m' of a-softmax is given 2 times"),
    ("arcface(0.3)", "is no margin: write it as arcface or arcface(name=number,...)"),
    ("a-softmax(m=4)(m=3)", "is no margin: write it as a-softmax or a-softmax(name=number,...)"),
    ("a-softmax(m={[]: 1})", "is no margin: write it as"),
    (f"a-softmax(m=1{'0' * 400})", "m of a-softmax must be finite, not an integer of 401 digits"),
    (f"a-softmax(m=1{'0' * 400}/3)", "is no margin: write it as"),
]


@pytest.mark.parametrize(("spec", "words"), WRONG, ids=[spec[:30] for spec, _ in WRONG])
def test_wrong_values_are_one_sentence(spec: str, words: str):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the words follow
        as_margin(spec)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("spec", ["arcface(m=True)", "sphereface2(share='a')", "sphereface-r(detach='no')"])
def test_the_command_line_tells_it_without_a_traceback(spec: str, capsys: pytest.CaptureFixture[str]):
    assert main(["train", "--margin", spec]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert "is no margin" in told


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("fgsm(epsilon='a')", "is no adversary: epsilon of fgsm must be a number, not 'a'"),
        ("pgd(steps=3,steps=4)", "'steps' of pgd is given 2 times in 'pgd(steps=3,steps=4)': give it once"),
    ],
)
def test_adversaries_are_told_likewise(spec: str, words: str):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the words follow
        as_adversary(spec)
    assert words in str(error.value)


def test_no_name_at_all_is_near_to_none():
    with pytest.raises(ValueError, match="unknown margin ''") as error:
        as_margin("")
    assert "did you mean" not in str(error.value)


def test_in_python_a_wrong_type_is_an_error_of_type():
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
def test_numbers_of_other_libraries_are_printed_as_plain_ones(margin, spec: str):
    assert str(margin) == spec
    assert as_margin(spec) == margin
