"""Operators as test parameters: all of them, or those that cover every pair of magnitude, angle and weighting."""

import dataclasses
import functools
import itertools
from collections.abc import Iterable
from typing import Any

import pytest

import dcnet


def pairwise(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """A few combinations of values, one per axis, that cover every pair of values of any two axes."""
    combinations = {each: set(itertools.combinations(enumerate(each), 2)) for each in itertools.product(*axes)}
    uncovered, chosen = set().union(*combinations.values()), []
    while uncovered:
        chosen.append(max(combinations, key=lambda each: len(combinations[each] & uncovered)))
        uncovered -= combinations[chosen[-1]]
    return chosen


def combination_params(*axes: Iterable[Any]) -> list[Any]:
    """All combinations of values as test parameters; those that are not pairwise are marked slow."""
    quick, lists = set(pairwise(*axes)), [list(axis) for axis in axes]
    return [
        pytest.param(*each, id="-".join(map(str, each)), marks=[] if each in quick else pytest.mark.slow)
        for each in itertools.product(*lists)
    ]


def _spec(magnitude: str, angle: str, weighting: str) -> str:
    return f"{magnitude}-{angle}" + ("" if weighting == "unweighted" else f"+{weighting}")


@functools.cache
def all_operators() -> tuple[str, ...]:
    """Every magnitude x angle x weighting of the registries, with default constants."""
    names = itertools.product(dcnet.magnitude.registry, dcnet.angle.registry, dcnet.weighting.registry)
    return tuple(_spec(*each) for each in names)


@functools.cache
def pairwise_operators() -> tuple[str, ...]:
    """Operators that cover every pair of magnitude, angle and weighting."""
    names = pairwise(dcnet.magnitude.registry, dcnet.angle.registry, dcnet.weighting.registry)
    return tuple(_spec(*each) for each in names)


def operator_params(specs: Iterable[str] | None = None) -> list[Any]:
    """Specs, all operators by default, as test parameters; those that are not pairwise are marked slow."""
    quick = set(pairwise_operators())
    chosen = all_operators() if specs is None else specs
    return [pytest.param(spec, id=spec, marks=[] if spec in quick else pytest.mark.slow) for spec in chosen]


def fixed_radius(operator: str, radius: float) -> dcnet.Operator:
    """The operator with its radius, if it has one, replaced by a fixed, absolute one."""
    op = dcnet.Operator.parse(operator)
    if op.decay is None:
        return op
    return dcnet.Operator(dataclasses.replace(op.magnitude, radius=radius), op.angle, op.weighting)
