"""Margins by the names that people use: one margin whatever was typed, and one name in records."""

import dataclasses
import json
from typing import ClassVar

import pytest

from dcnet.cli.app import main
from dcnet.losses import Margin, MarginSoftmax, ShardedMarginSoftmax, aliases, as_margin, margin, registry
from dcnet.training.recipes import recipe

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
}


@pytest.mark.parametrize(("typed", "name"), MEANT.items())
def test_a_name_that_people_use_is_the_margin(typed: str, name: str):
    assert as_margin(typed) == as_margin(name)
    assert str(as_margin(typed)) == name


@pytest.mark.parametrize("name", registry)
def test_the_class_of_a_margin_is_a_name_of_it(name: str):
    assert as_margin(registry[name].__name__) == registry[name]()


def test_every_alias_is_another_name_of_one_margin():
    assert set(aliases.values()) <= set(registry)
    assert not set(aliases) & set(registry)
    assert {str(as_margin(alias)) for alias in aliases} == set(aliases.values())


@pytest.mark.parametrize("head", [MarginSoftmax, ShardedMarginSoftmax])
def test_heads_take_them_with_parameters(head: type[MarginSoftmax]):
    assert str(head(5, 4, "CosFace(m=0.2)").margin) == "am-softmax(m=0.2)"


def test_a_config_is_the_same_whichever_name_was_typed():
    configs = [recipe("features", margin=spec) for spec in ("am-softmax(m=0.2)", "cosface(m=0.2)", "CosFace(m=1/5)")]
    assert {config.margin for config in configs} == {"am-softmax(m=0.2)"}
    assert len({config.hash for config in configs}) == len({config.name for config in configs}) == 1


def test_the_command_line_lists_them(capsys: pytest.CaptureFixture[str]):
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
        ("cosface(m='a')", "\"cosface(m='a')\" is no margin: m of am-softmax must be a number, not 'a'"),
        ("CosFace(s=3)", "CosFace has no 's' in 'CosFace(s=3)': it has m"),
    ],
)
def test_errors_quote_what_was_typed(spec: str, words: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the words follow
        as_margin(spec)
    assert words in str(error.value)
    assert main(["train", "--margin", spec]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert words in told


def test_a_name_that_is_taken_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(margin, "registry", dict(registry))
    monkeypatch.setattr(margin, "aliases", dict(aliases))

    @dataclasses.dataclass(frozen=True)
    class Own(Margin):
        name: ClassVar[str] = "own"
        aliases: ClassVar[tuple[str, ...]] = ("mine", "cosface")
        about: ClassVar[str] = "s cos(theta_y)"

    with pytest.raises(ValueError, match="'cosface' is taken: AMSoftmax is a margin of that name"):
        margin.register(Own)
    assert "own" not in margin.registry
    Own.aliases = ("mine",)
    margin.register(Own)
    assert as_margin("Mine") == Own()
    with pytest.raises(ValueError, match="'own' is taken: Own is"):
        margin.register(Own)
