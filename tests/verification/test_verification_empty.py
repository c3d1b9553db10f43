"""Measurements of nothing: one sentence each."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dcnet import verification as V
from dcnet.robustness import accuracy, attacks, certify, corruptions, curve

E, NONE, L, S = torch.randn(3, 4), torch.zeros(0, 4), torch.tensor([0, 0, 1]), torch.zeros(0)
NO_LABELS, NO_ANSWERS = L[:0], S.bool()
MODEL, NO_IMAGES = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), torch.zeros(0, 3, 2, 2)


class Flat(nn.Module):
    def features(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1)


CALLS: dict[str, Callable[[], Any]] = {
    "embed": lambda: V.embed(Flat(), []),
    "embed a batch": lambda: V.embed(Flat(), [NO_IMAGES]),
    "normalized": lambda: V.normalized(NONE),
    "pair_scores": lambda: V.pair_scores(E, NO_LABELS, NO_LABELS),
    "score_histogram": lambda: V.score_histogram(NONE, NO_LABELS),
    "nearest": lambda: V.nearest(NONE, E),
    "identify probes": lambda: V.identify(NONE, NO_LABELS, E, L),
    "identify gallery": lambda: V.identify(E, L, NONE, NO_LABELS),
    "retrieve": lambda: V.retrieve(NONE, NO_LABELS),
    "retrieve from a gallery": lambda: V.retrieve(E, L, NONE, NO_LABELS),
    "cmc": lambda: V.cmc(V.Identified(S, NO_LABELS, NO_LABELS)),
    "open_set_rate": lambda: V.open_set_rate(V.Identified(S, NO_LABELS, NO_LABELS)),
    "roc": lambda: V.roc(S, NO_ANSWERS),
    "best_threshold": lambda: V.best_threshold(S, NO_ANSWERS),
    "accuracy": lambda: V.accuracy([], [], 0.5),
    "fold_accuracy": lambda: V.fold_accuracy(S, NO_ANSWERS, NO_LABELS),
    "make_folds": lambda: V.make_folds(NO_ANSWERS),
    "calibrate": lambda: V.calibrate([], []),
    "sample_pairs": lambda: V.sample_pairs(NO_LABELS, 2),
    "hyperplane": lambda: V.HyperplaneSimilarity(NONE),
    "people_disjoint": lambda: V.people_disjoint(V.Pairs.of_names([]), ["a"]),
    **{
        name: lambda name=name: getattr(attacks, name)(MODEL, NO_IMAGES, NO_LABELS, epsilon=0.1)
        for name in attacks.registry
    },
    "curve": lambda: curve(MODEL, NO_IMAGES, NO_LABELS, "fgsm", epsilons=[0.1]),
    "accuracy of a network": lambda: accuracy(MODEL, NO_IMAGES, NO_LABELS),
    "corrupt": lambda: corruptions.corrupt(NO_IMAGES, "contrast", 1),
    "certify": lambda: certify(MODEL, 0.1, x=NO_IMAGES, y=NO_LABELS),
}


@pytest.mark.parametrize("call", CALLS)
def test_nothing_is_one_sentence(call: str):
    with pytest.raises(ValueError, match=r"empty|no |none|0") as error:
        CALLS[call]()
    assert "\n" not in str(error.value)


def test_pairs_of_no_features_have_no_similarities():
    assert V.HyperplaneSimilarity(E)(NONE, NONE).shape == (0,)
