"""Norms as quality: the fit against scikit-learn, and errors after discards against plain loops."""

import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from dcnet.verification import QualityScore, discard_errors, fit_quality, norms_of, pair_quality


def some_scores(seed, count=400):
    """Scores whose level depends on the quality."""
    generator = np.random.default_rng(seed)
    same, quality = generator.random(count) < 0.3, generator.normal(2, 0.5, count)
    return generator.normal(0, 0.3, count) + 0.4 * same - 0.2 * quality, same, quality


@pytest.mark.parametrize("seed", range(4))
def test_weight_is_that_of_a_logistic_regression(seed):
    scores, same, quality = some_scores(seed)
    model = LogisticRegression(C=np.inf, class_weight="balanced", tol=1e-10, max_iter=1000)
    ((per_score, per_quality),) = model.fit(np.stack([scores, quality], 1), same).coef_
    found = fit_quality(scores, same, quality)
    assert found.weight == pytest.approx(per_quality / per_score, rel=1e-3)
    assert found.center == pytest.approx(quality.mean())
    corrected = found(scores, quality).numpy()
    assert corrected == pytest.approx(scores + found.weight * (quality - quality.mean()))
    assert np.corrcoef(corrected[same], quality[same])[0, 1] ** 2 < np.corrcoef(scores[same], quality[same])[0, 1] ** 2


def test_weight_is_zero_if_it_cannot_be_found():
    scores, same, quality = some_scores(0)
    assert fit_quality(scores, same, np.ones_like(quality)).weight == 0
    assert fit_quality(scores, np.ones_like(same), quality).weight == 0
    # Higher scores for different pairs.
    assert fit_quality(-scores - 0.5 * same, same, 0.1 * quality).weight == 0
    # Separable pairs have no finite coefficients, but a finite weight.
    assert math.isfinite(fit_quality(scores + 10 * same, same, quality).weight)


def test_pair_quality_is_the_log_of_the_smaller_norm():
    embeddings = torch.tensor([[3.0, 4.0], [0.0, 1.0], [6.0, 8.0]])
    norms = norms_of(embeddings)
    assert norms.tolist() == [5, 1, 10]
    found = pair_quality(norms, [0, 0, 2], [1, 2, 2])
    assert found.tolist() == pytest.approx([0, math.log(5), math.log(10)])


@pytest.mark.parametrize("far", [0.1, 0.25])
def test_discards_match_plain_loops(far):
    generator = np.random.default_rng(1)
    norms, first, second = generator.random(30) + 1, *generator.integers(0, 30, (2, 300))
    scores, same = generator.integers(0, 20, 300) / 20, generator.random(300) < 0.5
    impostors = [score for score, answer in zip(scores, same, strict=True) if not answer]
    threshold = min(t for t in [*scores, 9.0] if np.mean([score >= t for score in impostors]) <= far)
    shares = (0.0, 0.1, 0.5)
    found = discard_errors(scores, same, (torch.tensor(first), torch.tensor(second)), norms, far, shares)
    assert found == discard_errors(scores, same, (first, second.tolist()), norms, far, shares)
    for share, at in zip(shares, found, strict=True):
        discarded = set(sorted(range(30), key=lambda image: norms[image])[: int(share * 30)])
        kept = [i for i in range(300) if not {first[i], second[i]} & discarded]
        genuine, impostor = ([scores[i] for i in kept if same[i] == kind] for kind in (True, False))
        assert (at["discarded"], at["genuine"], at["impostor"]) == (share, len(genuine), len(impostor))
        assert at["frr"] == pytest.approx(np.mean([score < threshold for score in genuine]))
        assert at["far"] == pytest.approx(np.mean([score >= threshold for score in impostor]))


def discards(**given):
    arguments = {"images": ([0, 1], [1, 0]), "norms": [1.0, 2.0], **given}
    return discard_errors([0.5, 0.1], [True, False], far=0.999, **arguments)


def test_no_discards_if_impostor_pairs_are_too_few_for_the_rate():
    images = torch.tensor([0, 0]), torch.tensor([1, 2])
    assert discard_errors([0.1, 0.2], [True, False], images, [1.0, 2.0, 3.0], far=0.01) == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: norms_of([1.0, 2.0]), "embeddings must be \\[N, D\\], not \\[2\\]"),
        (lambda: pair_quality([1.0, 0.0], [0], [1]), "norms must be finite numbers above 0"),
        (lambda: pair_quality([], [0], [1]), "norms must be finite numbers above 0 \\[N\\], not \\[0\\]"),
        (lambda: pair_quality([1.0, 2.0], [0], [-1]), "indices of pairs must be from 0 to 1, not -1"),
        (lambda: pair_quality([1.0, 2.0], [0, 1], [1]), "equally many first and second images, not 2 and 1"),
        (lambda: fit_quality([0.1, 0.2], [True, False], [1.0]), "quality must be finite \\[2\\]"),
        (lambda: QualityScore(math.nan, 0.0), "weight of a quality score must be finite"),
        (lambda: discard_errors([0.1], [True], ([0], [0]), [1.0], far=2), "far must be"),
        (lambda: discards(images=([0], [1])), "images must be the indices of 2 pairs, not of 1"),
        (lambda: discards(images=([0, 2], [1, 1])), "indices of pairs must be from 0 to 1, not 2"),
        (lambda: discards(norms=[1.0, math.nan]), "norms must be finite numbers above 0"),
        (lambda: discards(shares=[1.0]), "each of shares must be in \\[0, 1\\), not 1.0"),
    ],
)
def test_invalid_arguments_are_rejected(call, message):
    with pytest.raises(ValueError, match=message):
        call()
