"""Similarity by hyperplanes, against least squares by hand and by what it is for."""

import math

import pytest
import torch

from dcnet.verification import HyperplaneSimilarity


def background(count=200, features=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.tensor([3.0, 1.0, 1.0, 0.5, 0.2, 0.1])[:features]
    return torch.randn(count, features, generator=generator) * spread + 1.0


def centred():
    return torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]], dtype=torch.float64)


def with_nan():
    features = torch.ones(3, 6)
    features[1, 2] = torch.nan
    return features


def test_the_hyperplane_is_that_of_least_squares():
    """w, c with w x + c = 1 for the feature and -1 for the background, each of the two with half of the weight."""
    others, x = background().double(), torch.tensor([4.0, -1.0, 0.5, 2.0, 1.0, 0.3], dtype=torch.float64)
    similarity = HyperplaneSimilarity(others, ridge=1e-9)
    rows = torch.cat([torch.cat([others, x[None]]), torch.ones(201, 1, dtype=torch.float64)], 1)
    weights = torch.cat([torch.full((200,), 1 / 200, dtype=torch.float64), torch.ones(1, dtype=torch.float64)]).sqrt()
    wanted = torch.cat([-torch.ones(200, dtype=torch.float64), torch.ones(1, dtype=torch.float64)])
    solved = torch.linalg.lstsq(rows * weights[:, None], wanted * weights).solution[:-1]
    assert torch.allclose(similarity.normals(x[None])[0], solved / solved.norm(), atol=1e-6)


def test_a_feature_is_on_the_right_side_of_its_own_hyperplane_and_the_background_on_the_other():
    others, x = background(), torch.full((1, 6), 5.0)
    similarity = HyperplaneSimilarity(others)
    assert similarity.distances(x, x) > 0
    mean = others.mean(0, keepdim=True)
    assert torch.allclose(similarity.distances(x, mean), -similarity.distances(x, x))


def test_it_is_symmetric_and_knows_which_directions_tell_nothing():
    """All differ in the first feature and hardly in the last, which a cosine does not know."""
    similarity = HyperplaneSimilarity(background() - 1.0)
    one = torch.tensor([[3.0, 0.0, 0.0, 0.0, 0.0, 1.0]])
    same, other = torch.tensor([[-3.0, 0, 0, 0, 0, 1.0]]), torch.tensor([[3.0, 0, 0, 0, 0, -1.0]])
    assert torch.nn.functional.cosine_similarity(one, same) < torch.nn.functional.cosine_similarity(one, other)
    assert similarity(one, same) > 0 > similarity(one, other)
    assert torch.equal(similarity(one, other), similarity(other, one))


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: HyperplaneSimilarity(torch.ones(1, 3)), "two or more"),
        (lambda: HyperplaneSimilarity(torch.full((4, 3), torch.nan)), "finite"),
        (lambda: HyperplaneSimilarity(background(), ridge=0), "ridge must be above 0 and finite, not 0"),
        (lambda: HyperplaneSimilarity(background(), ridge=math.inf), "ridge must be above 0 and finite, not inf"),
        (lambda: HyperplaneSimilarity(background())(torch.ones(2, 5), torch.ones(2, 5)), r"features must be \[N, 6\]"),
        (lambda: HyperplaneSimilarity(background())(torch.ones(2, 6), torch.ones(3, 6)), "of one shape"),
        (lambda: HyperplaneSimilarity(centred())(torch.zeros(1, 2), torch.ones(1, 2)), "has no hyperplane"),
        (lambda: HyperplaneSimilarity(torch.full((7, 3), 0.1)), "must differ, but all 7 are the same"),
        (lambda: HyperplaneSimilarity(1e-200 * centred()), "variance of the background must be a finite number above"),
        (lambda: HyperplaneSimilarity(1e200 * centred()), "variance of the background must be a finite number above"),
        (lambda: HyperplaneSimilarity(background())(with_nan(), torch.ones(3, 6)), "finite, but 1 of 3 are not"),
        (lambda: HyperplaneSimilarity(background())(torch.ones(3, 6), with_nan()), "finite, but 1 of 3 are not"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(call, problem):
    with pytest.raises(ValueError, match=problem):
        call()
