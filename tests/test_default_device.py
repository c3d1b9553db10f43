"""Attacks, corruptions, certificates and verification on the CPU while another device is the default."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import dcnet
from dcnet import verification
from dcnet.robustness import attacks, corruptions
from dcnet.robustness.certificates.certificate import certify

GENERATOR = torch.Generator().manual_seed(0)
EMBEDDINGS, PEOPLE = torch.randn(40, 8, generator=GENERATOR), torch.arange(40) % 8
PAIRS = verification.sample_pairs(PEOPLE, 60)
SCORES = verification.pair_scores(EMBEDDINGS, PAIRS.first, PAIRS.second)
IMAGES, LABELS = torch.rand(6, 1, 8, 8, generator=GENERATOR), torch.arange(6) % 3


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return dcnet.create_model("cnn9-small", "tanh-cos", num_classes=3, in_channels=1, image_size=8, width=0.1).eval()


def scored_by_histogram() -> Any:
    return verification.roc_of_histogram(verification.score_histogram(EMBEDDINGS, PEOPLE, bins=50)).auc()


def identified() -> Any:
    return verification.cmc(verification.identify(EMBEDDINGS[:20], PEOPLE[:20], EMBEDDINGS[20:], PEOPLE[20:]))


def attacked(name: str) -> Any:
    fewer = {"queries": 50} if name == "square" else {}
    return attacks.perturb(network(), IMAGES, LABELS, name, epsilon=0.1, **fewer).tolist()


MEASURED: dict[str, Callable[[], Any]] = {
    "sample_pairs": lambda: verification.sample_pairs(PEOPLE, 60).first.tolist(),
    "pair_scores": lambda: verification.pair_scores(EMBEDDINGS, PAIRS.first, PAIRS.second).tolist(),
    "roc": lambda: verification.roc(SCORES, PAIRS.same).eer(),
    "histogram": scored_by_histogram,
    "folds": lambda: verification.make_folds(PAIRS.same).tolist(),
    "fold_accuracy": lambda: verification.fold_accuracy(SCORES, PAIRS.same, verification.make_folds(PAIRS.same)).mean,
    "calibrate": lambda: verification.calibrate(SCORES[PAIRS.same], SCORES[~PAIRS.same], 0.1, 0.1).to_json(),
    "identify": identified,
    "nearest": lambda: verification.nearest(EMBEDDINGS, count=2).indices.tolist(),
    "corruptions": lambda: corruptions.accuracies(network(), IMAGES, LABELS),
    "certify": lambda: certify(network(), 0.01, x=IMAGES, y=LABELS).summary(),
    "curve": lambda: attacks.curve(network(), IMAGES, LABELS, attack="pgd", epsilons=[0.0, 0.1]),
    **{name: partial(attacked, name) for name in attacks.registry},
}


# AutoAttack consists of attacks that are tested separately.
SLOW = {"autoattack": pytest.mark.slow}


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in MEASURED])
def test_another_default_device_changes_nothing(name: str):
    """The device "meta" stands for a GPU: its tensors have no values and cannot be combined with others."""
    expected = MEASURED[name]()
    model = network()
    with torch.device("meta"), pytest.MonkeyPatch.context() as patched:
        # Created before, on the CPU.
        patched.setitem(globals(), "network", lambda: model)
        assert MEASURED[name]() == expected
