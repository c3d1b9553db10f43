"""Calibration and detection of unknown images against plain loops."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from dcnet.robustness.uncertainty import auroc, best_temperature, calibration_error, scaled_calibration_error


def draw(count=200, classes=4, scale=3.0, seed=0):
    """Logits of which about two thirds predict their label."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=generator)
    logits = torch.randn(count, classes, generator=generator, dtype=torch.float64)
    return scale * (logits + torch.nn.functional.one_hot(labels, classes)), labels


def in_loops(logits, labels, bins):
    """For each bin, the predictions in it, their mean confidence and their accuracy."""
    found = []
    for values, label in zip(logits.tolist(), labels.tolist(), strict=True):
        exponentials = [math.exp(value) for value in values]
        confidence = max(exponentials) / sum(exponentials)
        found.append((confidence, values.index(max(values)) == label))
    error = 0.0
    for place in range(bins):
        own = [one for one in found if place / bins <= one[0] < (place + 1) / bins or one[0] == 1 == (place + 1) / bins]
        if own:
            gap = sum(one[0] for one in own) / len(own) - sum(one[1] for one in own) / len(own)
            error += len(own) / len(found) * abs(gap)
    return error


@given(seed=st.integers(0, 100), bins=st.integers(1, 20), scale=st.sampled_from([0.1, 1.0, 10.0, 1000.0]))
def test_calibration_error_matches_plain_loops(seed, bins, scale):
    logits, labels = draw(50, scale=min(scale, 100.0), seed=seed)
    assert calibration_error(logits, labels, bins) == pytest.approx(in_loops(logits, labels, bins), abs=1e-9)


def test_the_best_temperature_has_the_lowest_loss():
    logits, labels = draw()
    found = best_temperature(logits, labels)
    losses = [
        torch.nn.functional.cross_entropy(logits / temperature, labels).item()
        for temperature in (0.95 * found, found, 1.05 * found)
    ]
    assert losses[1] < min(losses[0], losses[2])
    assert best_temperature(5 * logits, labels) == pytest.approx(5 * found, rel=1e-3)


def test_scaled_calibration_matches_plain_loops():
    """Even images have the temperature of odd ones, and the other way around."""
    logits, labels = draw(scale=8.0)
    temperatures = [best_temperature(logits[1 - part :: 2], labels[1 - part :: 2]) for part in (0, 1)]
    scaled = torch.stack([values / temperatures[place % 2] for place, values in enumerate(logits)])
    assert temperatures[0] != temperatures[1]
    before = logits.clone()
    assert scaled_calibration_error(logits, labels) == pytest.approx(in_loops(scaled, labels, 15), abs=1e-9)
    assert torch.equal(logits, before)
    assert scaled_calibration_error(logits, labels) < calibration_error(logits, labels) / 2


@given(known=st.lists(st.integers(0, 9), min_size=1), unknown=st.lists(st.integers(0, 9), min_size=1))
def test_auroc_matches_scikit_learn(known, unknown):
    wanted = roc_auc_score([1] * len(known) + [0] * len(unknown), known + unknown)
    assert auroc(torch.tensor(known), torch.tensor(unknown)) == pytest.approx(wanted)
