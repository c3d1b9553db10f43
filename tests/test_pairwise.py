"""The default test operators cover every pair of magnitude, angle and weighting."""

import itertools

from helpers.operators import all_operators, combination_params, operator_params, pairwise, pairwise_operators

import dcnet


def pairs(specs):
    found = set()
    for op in map(dcnet.Operator.parse, specs):
        names = (op.magnitude.name, op.angle.name, op.weighting.name)
        found |= set(itertools.combinations(enumerate(names), 2))
    return found


def test_a_quarter_of_the_operators_cover_every_pair():
    assert pairs(pairwise_operators()) == pairs(all_operators())
    assert set(pairwise_operators()) < set(all_operators())
    assert len(pairwise_operators()) <= len(dcnet.magnitude.registry) * len(dcnet.angle.registry)
    assert pairwise_operators.__wrapped__() == pairwise_operators()


def test_operators_that_are_not_pairwise_are_slow():
    params = operator_params()
    assert [param.id for param in params] == list(all_operators())
    assert {param.id for param in params if not param.marks} == set(pairwise_operators())
    assert [param.id for param in operator_params(["tanh-cos", "ball-cos"])] == ["tanh-cos", "ball-cos"]


def test_pairwise_of_axes_of_any_length():
    assert pairwise("ab", "c") == [("a", "c"), ("b", "c")]
    assert len(pairwise("ab", "cd", "ef")) == 4
    assert len(combination_params("ab", "cd", "ef")) == 8
