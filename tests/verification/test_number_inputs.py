"""NumPy arrays, lists and empty inputs in every function that takes numbers."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dcnet import verification as V
from dcnet.checks import as_tensor
from dcnet.losses import MarginSoftmax
from dcnet.robustness import attacks, certify, corruptions, curve
from dcnet.verification import (
    HyperplaneSimilarity,
    Pairs,
    accuracy,
    best_threshold,
    calibrate,
    development_accuracy,
    embed,
    fold_accuracy,
    identify,
    make_folds,
    nearest,
    normalized,
    pair_scores,
    retrieve,
    roc,
    sample_pairs,
    score_histogram,
)

torch.manual_seed(0)
EMBEDDINGS, LABELS = torch.randn(24, 5, dtype=torch.float64), torch.arange(24) % 4
SCORES, SAME = torch.rand(40, dtype=torch.float64), torch.arange(40) % 2 == 0
FIRST, SECOND, FOLDS = torch.arange(12), torch.arange(12, 24), torch.arange(40) % 4


class Flat(nn.Module):
    def features(self, images: Tensor) -> Tensor:
        return images.flatten(1) + 0.1


def read_only(given: Any) -> Any:
    array = given.numpy().copy()
    array.flags.writeable = False
    return array


def backwards(given: Any) -> Any:
    return given.numpy()[::-1].copy()[::-1]


def columns_first(given: Any) -> Any:
    return np.asfortranarray(given.numpy())


def spread(given: Any) -> Any:
    return np.repeat(given.numpy(), 3, axis=0)[::3]


def swapped(given: Any) -> Any:
    array = given.numpy()
    return array.astype(array.dtype.newbyteorder(">"))


KINDS: dict[str, Callable[[Any], Any]] = {
    "array": lambda given: given.numpy(),
    "list": lambda given: given.tolist(),
    "tuple": lambda given: tuple(given.tolist()),
    "tensors": lambda given: list(given.unbind()),
    "read-only": read_only,
    "backwards": backwards,
    "columns first": columns_first,
    "spread": spread,
    "big-endian": swapped,
}
similarity = HyperplaneSimilarity(EMBEDDINGS)

CALLS: dict[str, Callable[[Callable[[Any], Any]], Any]] = {
    "normalized": lambda of: normalized(of(EMBEDDINGS)),
    "pair_scores": lambda of: pair_scores(of(EMBEDDINGS), of(FIRST), of(SECOND)),
    "score_histogram": lambda of: score_histogram(of(EMBEDDINGS), of(LABELS), bins=50),
    "nearest": lambda of: nearest(of(EMBEDDINGS), of(EMBEDDINGS[:9]), count=2),
    "identify": lambda of: identify(of(EMBEDDINGS), of(LABELS), of(EMBEDDINGS[:9]), of(LABELS[:9]), pool="mean"),
    "retrieve": lambda of: retrieve(of(EMBEDDINGS), of(LABELS), of(EMBEDDINGS[:9]), of(LABELS[:9])),
    "roc": lambda of: roc(of(SCORES), of(SAME)),
    "best_threshold": lambda of: best_threshold(of(SCORES), of(SAME)),
    "accuracy": lambda of: accuracy(of(SCORES), of(SAME), 0.5, balanced=True),
    "fold_accuracy": lambda of: fold_accuracy(of(SCORES), of(SAME), of(FOLDS)),
    "make_folds": lambda of: make_folds(of(SAME)),
    "development_accuracy": lambda of: development_accuracy((of(SCORES), of(SAME)), (of(SCORES), of(SAME))),
    "calibrate": lambda of: calibrate(of(SCORES[SAME]), of(SCORES[~SAME]), 0.1, 0.1),
    "sample_pairs": lambda of: sample_pairs(of(LABELS), 10),
    "hyperplane": lambda of: HyperplaneSimilarity(of(EMBEDDINGS))(of(EMBEDDINGS[:9]), of(EMBEDDINGS[9:18])),
    "distances": lambda of: similarity.distances(of(EMBEDDINGS[:9]), of(EMBEDDINGS[9:18])),
    "Pairs": lambda of: Pairs(of(FIRST), of(SECOND), of(SAME[:12]), of(FOLDS[:12])),
    "diagnose": lambda of: MarginSoftmax(5, 4, "arcface").double().diagnose(of(EMBEDDINGS), of(LABELS)),
}


def plain(found: Any) -> Any:
    if dataclasses.is_dataclass(found):
        return {name: plain(value) for name, value in vars(found).items()}
    return found.tolist() if isinstance(found, Tensor) else found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.filterwarnings("error")
def test_arrays_and_lists_give_the_results_of_tensors(call: str, kind: str):
    results = []
    for of in (lambda given: given, KINDS[kind]):
        torch.manual_seed(1)
        results.append(plain(CALLS[call](of)))
    assert results[0] == results[1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_arrays_of_any_precision(dtype: torch.dtype):
    embeddings, scores = EMBEDDINGS.to(dtype), SCORES.to(dtype)
    assert plain(retrieve(embeddings.numpy(), LABELS.numpy())) == plain(retrieve(embeddings, LABELS))
    assert torch.equal(pair_scores(embeddings.numpy(), FIRST, SECOND), pair_scores(embeddings, FIRST, SECOND))
    assert plain(roc(scores.numpy(), SAME.numpy())) == plain(roc(scores, SAME))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32"])
def test_labels_of_any_integer_type(dtype: str):
    assert plain(retrieve(EMBEDDINGS, LABELS.numpy().astype(dtype))) == plain(retrieve(EMBEDDINGS, LABELS))
    assert plain(identify(EMBEDDINGS, LABELS.numpy().astype(dtype), EMBEDDINGS, LABELS)) == plain(
        identify(EMBEDDINGS, LABELS, EMBEDDINGS, LABELS)
    )


def test_embed_takes_arrays():
    images = np.random.default_rng(0).integers(0, 256, (4, 1, 3, 3), dtype=np.uint8)
    images.flags.writeable = False
    expected = embed(Flat(), [torch.tensor(images)])
    assert torch.equal(embed(Flat(), [images]), expected)
    assert torch.equal(embed(Flat(), [(images, np.zeros(4))]), expected)


def test_tensors_with_a_gradient_are_detached():
    assert not pair_scores(EMBEDDINGS.clone().requires_grad_(), FIRST, SECOND).requires_grad
    assert roc(SCORES.clone().requires_grad_(), SAME).auc() == roc(SCORES, SAME).auc()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([[1.0, 2.0], [3.0]], "labels must be a tensor, an array or lists of equal length, not list"),
        (["a", "b"], "labels must be numbers, not list of dtype <U1"),
        (np.array([object()]), "labels must be numbers, not ndarray of dtype object"),
        (None, "labels must be numbers, not None of dtype object"),
        (np.array([1j]), "labels must be numbers, not ndarray of dtype complex128"),
    ],
)
def test_as_tensor_rejects_values_without_numbers(given: Any, message: str):
    with pytest.raises(TypeError) as error:
        as_tensor(given, "labels")
    assert str(error.value) == message


E, NONE, L, S = torch.randn(3, 4), torch.zeros(0, 4), torch.tensor([0, 0, 1]), torch.zeros(0)
NO_LABELS, NO_ANSWERS = L[:0], S.bool()
MODEL, NO_IMAGES = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), torch.zeros(0, 3, 2, 2)


EMPTY_CALLS: dict[str, Callable[[], Any]] = {
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
    "accuracy of a network": lambda: attacks.accuracy(MODEL, NO_IMAGES, NO_LABELS),
    "corrupt": lambda: corruptions.corrupt(NO_IMAGES, "contrast", 1),
    "certify": lambda: certify(MODEL, 0.1, x=NO_IMAGES, y=NO_LABELS),
}


@pytest.mark.parametrize("call", EMPTY_CALLS)
def test_empty_inputs_raise_one_sentence(call: str):
    with pytest.raises(ValueError, match=r"empty|no |none|0") as error:
        EMPTY_CALLS[call]()
    assert "\n" not in str(error.value)


def test_hyperplane_similarity_of_no_pairs_is_empty():
    assert V.HyperplaneSimilarity(E)(NONE, NONE).shape == (0,)
