"""Verification measures as plain values for records: for pairs, for LFW, and for unseen classes of CIFAR-100."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dcnet.data.cifar import OpenSet, cifar100_open
from dcnet.data.dataset import Split
from dcnet.data.image_folder import labels_of
from dcnet.data.lfw import find_lfw, trained_people
from dcnet.data.load import data_folder
from dcnet.verification.embeddings import embed, pair_scores, score_histogram
from dcnet.verification.folds import NO_FOLD, FoldAccuracy, Folds, fold_accuracy, fold_masks, make_folds
from dcnet.verification.identification import Identified, cmc, identify, open_set_rate, retrieve
from dcnet.verification.intervals import Interval, PeopleBootstrap, exact_interval
from dcnet.verification.pairs import (
    LfwData,
    Pairs,
    all_pairs,
    labels_by_folder,
    people_disjoint,
    sample_pairs,
)
from dcnet.verification.quality import discard_errors, fit_quality, norms_of, pair_quality
from dcnet.verification.roc_curve import Roc, TarAtFar, roc, roc_of_histogram
from dcnet.verification.threshold import Transfer, fold_transfer

Record = dict[str, Any]
RATES = (1e-1, 1e-2, 1e-3, 1e-4)


def count_pairs(pairs: Pairs) -> Record:
    """The number of pairs of each kind."""
    same = int(pairs.same.sum())
    return {"pairs": len(pairs), "same": same, "different": len(pairs) - same}


def pair_measures(
    scores: Tensor,
    same: Tensor,
    folds: Tensor,
    curve: Roc | None = None,
    people: tuple[Tensor, Tensor] | None = None,
) -> Record:
    """All measures of pairs, as shares from 0 to 1.

    Args:
        scores: the scores, [P].
        same: the answers, [P].
        folds: the folds, [P]; -1 for pairs without a fold, which count for the curve alone.
        curve: the ROC curve of the scores, if it is known already.
        people: the people of the first and of the second image, [P] each, for intervals; None if unknown.
    """
    scores = scores.cpu()
    inside = folds != NO_FOLD
    tested = scores[inside], same[inside], folds[inside]
    bootstrap = None if people is None else PeopleBootstrap(scores, *people)
    return {
        "folds": len(tested[2].unique()),
        "pairs_in_folds": len(tested[2]),
        "accuracy": _accuracy(fold_accuracy(*tested)),
        "balanced_accuracy": _accuracy(fold_accuracy(*tested, balanced=True)),
        **curve_measures(curve or roc(scores, same), bootstrap),
        "transfer": [transfer_values(found) for rate in RATES if (found := fold_transfer(*tested, rate))],
    }


def transfer_values(found: Transfer) -> Record:
    """A transfer as plain values."""
    return {**vars(found), "loss": found.loss}


EXACT = "95 % intervals of Clopper and Pearson, for a fixed threshold and independent pairs"


def curve_measures(curve: Roc, bootstrap: PeopleBootstrap | None = None) -> Record:
    """The measures that need no folds; intervals by the bootstrap, or exact ones of independent pairs."""
    found = [curve.tar_at_far(rate) for rate in RATES]
    intervals = [_exact(at, curve) for at in found] if bootstrap is None else bootstrap.tar_at_far(RATES)
    return {
        "auc": curve.auc(),
        "eer": curve.eer(),
        "tar_at_far": [_with_interval(*each) for each in zip(found, intervals, strict=True)],
        "interval": EXACT if bootstrap is None else str(bootstrap),
    }


def _exact(found: TarAtFar, curve: Roc) -> Interval | None:
    return None if found.tar is None else exact_interval(round(found.tar * curve.genuines), curve.genuines)


def _with_interval(found: TarAtFar, interval: Interval | None) -> Record:
    low, high = (None, None) if found.tar is None or interval is None else interval
    return {**vars(found), "low": low, "high": high}


def quality_measures(scores: Tensor, pairs: Pairs, folds: Tensor, norms: Tensor) -> Record:
    """Whether the norms of features measure quality.

    "tar_at_far" compares cosines with scores that are corrected for the norms, by weights from the other folds.
    "discard" has the false reject rate at a FAR of 1 % after images of the lowest norms are discarded.
    """
    inside = folds != NO_FOLD
    tested, answers, folds = scores.cpu().double()[inside], pairs.same[inside], folds[inside]
    quality = pair_quality(norms, pairs.first[inside], pairs.second[inside])
    corrected, weights = tested.clone(), []
    for own in fold_masks(folds, len(folds)):
        fitted = fit_quality(tested[~own], answers[~own], quality[~own])
        corrected[own] = fitted(tested[own], quality[own])
        weights.append(fitted.weight)
    rates = [[roc(each, answers).tar_at_far(rate).tar for each in (tested, corrected)] for rate in RATES]
    return {
        "norms": [float(norms.quantile(share)) for share in (0.0, 0.5, 1.0)],
        "weights": weights,
        "tar_at_far": [
            {"far": rate, "cosine": cosine, "corrected": both}
            for rate, (cosine, both) in zip(RATES, rates, strict=True)
        ],
        "discard": discard_errors(scores, pairs.same, (pairs.first, pairs.second), norms),
    }


def retrieval_measures(embeddings: Tensor, pairs: Pairs) -> Record | None:
    """Recall@k and mAP of the images of the pairs among themselves; None if their folders are not classes."""
    labels = labels_by_folder(pairs)
    if labels is None:
        return None
    found = retrieve(embeddings, labels)
    return {**vars(found), "recall": [{"k": k, "recall": share} for k, share in found.recall.items()]}


def _accuracy(found: FoldAccuracy) -> Record:
    return {
        "mean": found.mean,
        "standard_error": found.standard_error,
        "threshold": float(torch.tensor(found.thresholds, device="cpu").mean()),
        "folds": list(found.accuracies),
        "thresholds": list(found.thresholds),
    }


DEVELOPMENT, FOLDS = "pairsDevTest", "pairs"
BATCH = 256


def evaluate_faces(model: nn.Module, folder: Path | str | None = None, device: torch.device | str = "cpu") -> Record:
    """Measures a network that was trained on `lfw` on people of LFW that it has not seen.

    - "development": pairsDevTest, whose people are not in peopleDevTrain, in ten fixed folds.
    - "development_all": every pair of its images, for rates that need more than 500 impostor pairs.
    - "unseen": the ten folds of pairs without people of the training set. More impostor than genuine pairs remain: use
      the balanced accuracy.

    Args:
        model: takes images of 96 x 96, and has `features`.
        folder: the folder of the dataset `lfw`; None as in `dcnet.data.load_dataset`.
        device: the device to compute on.
    """
    data = LfwData(find_lfw(data_folder(folder)).root)
    development = data.pairs(DEVELOPMENT)
    unseen = people_disjoint(data.pairs(FOLDS), trained_people(data))
    # Images that are in both lists are embedded once.
    names = tuple(dict.fromkeys(development.names + unseen.pairs.names))
    embeddings = embed(model, data.faces(names).stack().split(BATCH), device, names=names)
    place = {name: at for at, name in enumerate(names)}
    return {
        "images": len(names),
        "development": {"list": DEVELOPMENT, **_of_pairs(embeddings, development, place)},
        "development_all": _of_all(embeddings, development, place),
        "unseen": {"list": FOLDS, "left_out": unseen.left_out, **_of_pairs(embeddings, unseen.pairs, place)},
    }


def _of_pairs(embeddings: Tensor, pairs: Pairs, place: dict[str, int]) -> Record:
    at, person = _places(pairs, place), labels_of(pairs.names)[0]
    scores, folds = pair_scores(embeddings, at[pairs.first], at[pairs.second]), Folds.of(pairs)
    people = person[pairs.first], person[pairs.second]
    found = pair_measures(scores, pairs.same, folds.numbers, people=people)
    return {**count_pairs(pairs), "fold_note": folds.note, **found}


def _of_all(embeddings: Tensor, pairs: Pairs, place: dict[str, int]) -> Record:
    """Measures of all pairs of the images in the list."""
    own, labels = embeddings[_places(pairs, place).to(embeddings.device)], labels_of(pairs.names)[0]
    curve, every = roc_of_histogram(score_histogram(own, labels)), all_pairs(labels)
    scores, people = pair_scores(own, every.first, every.second), (labels[every.first], labels[every.second])
    folds = Folds.by_people(every, labels).numbers
    return {
        **count_pairs(every),
        **curve_measures(curve, PeopleBootstrap(scores, *people)),
        "quality": quality_measures(scores, every, folds, norms_of(own)),
    }


def _places(pairs: Pairs, place: dict[str, int]) -> Tensor:
    """The indices of the embeddings of the images."""
    return torch.tensor([place[name] for name in pairs.names], device="cpu")


OPEN_SET_BATCH = 1000
PAIRS = 20_000
# Images per class in the gallery, of unseen and of known classes.
ENROLLED, KNOWN = 10, 50
FPIRS = (0.01, 0.1)


def evaluate_open_set(
    model: nn.Module, folder: Path | str | None = None, device: torch.device | str = "cpu", download: bool = True
) -> Record:
    """Measures a network that was trained on `cifar100-open` on the 20 unseen classes of CIFAR-100.

    See `open_set_measures`; folder and download are as in `dcnet.data.load_dataset`.
    """
    return open_set_measures(model, cifar100_open(folder, download), device)


def open_set_measures(
    model: nn.Module,
    parts: OpenSet,
    device: torch.device | str = "cpu",
    pairs: int = PAIRS,
    enrolled: int = ENROLLED,
    known: int = KNOWN,
) -> Record:
    """Open-set measures by cosine, as shares from 0 to 1.

    - "verification": sampled pairs of the unseen classes, half of them genuine.
    - "identification": some images of each unseen class are the gallery, all others are probes. "ranks" uses the
      gallery of all classes; "open" uses every second class, and probes of the others are unknown.
    - "detection": training images of the known classes are the gallery; the test set holds the known probes, the images
      of unseen classes the unknown ones.

    Args:
        model: a network with `features`.
        parts: known and unseen classes.
        device: the device to compute on.
        pairs: the number of sampled pairs.
        enrolled: images of each unseen class in its gallery.
        known: images of each known class in the gallery.
    """
    unseen = embed(model, parts.unseen.images.split(OPEN_SET_BATCH), device)
    chosen = first_of_each(parts.known.train.labels, known)
    gallery = Split(parts.known.train.images[chosen], parts.known.train.labels[chosen])
    of_gallery, of_test = (
        embed(model, part.images.split(OPEN_SET_BATCH), device) for part in (gallery, parts.known.test)
    )
    probes = torch.cat([of_test, unseen])
    # Labels of unknown probes are in no gallery.
    who = torch.cat([parts.known.test.labels, parts.unseen.labels + parts.known.num_classes])
    detected = identify(probes, who, of_gallery, gallery.labels, pool="mean")
    return {
        "unseen_classes": list(parts.unseen_classes),
        "unseen_images": len(parts.unseen),
        "verification": _verification(unseen, parts.unseen.labels, pairs),
        "identification": _identification(unseen, parts.unseen.labels, enrolled),
        "detection": _detection(detected, len(gallery)),
    }


def _verification(embeddings: Tensor, labels: Tensor, count: int) -> Record:
    pairs = sample_pairs(labels, count, seed=0)
    scores = pair_scores(embeddings, pairs.first, pairs.second)
    classes = labels[pairs.first], labels[pairs.second]
    return {**count_pairs(pairs), **pair_measures(scores, pairs.same, make_folds(pairs.same), people=classes)}


def _identification(embeddings: Tensor, labels: Tensor, enrolled: int) -> Record:
    inside = torch.zeros(len(labels), dtype=torch.bool, device="cpu")
    inside[first_of_each(labels, enrolled)] = True
    probes, who = embeddings[~inside.to(embeddings.device)], labels[~inside]

    def against(gallery: Tensor) -> Identified:
        return identify(probes, who, embeddings[gallery.to(embeddings.device)], labels[gallery], pool="mean")

    closed, opened = against(inside), against(inside & (labels % 2 == 0))
    counts = {"gallery": int(inside.sum()), "probes": len(who)}
    return {**counts, "ranks": list(cmc(closed, ranks=5)), "open": _rates(opened)}


def _detection(found: Identified, gallery: int) -> Record:
    """Measures of open-set recognition: is a probe of a known class, by its highest score, and of which one?"""
    known = found.known
    right = int((found.ranks == 1).sum()) / int(known.sum())
    counts = {"gallery": gallery, "known": int(known.sum()), "unknown": int((~known).sum())}
    return {**counts, "rank_1_of_known": right, **curve_measures(roc(found.scores, known)), "open": _rates(found)}


def _rates(found: Identified) -> list[Record]:
    return [vars(open_set_rate(found, fpir)) for fpir in FPIRS]


def first_of_each(labels: Tensor, count: int) -> Tensor:
    """The indices of the first `count` images of each class, int64, ascending."""
    order = labels.argsort(stable=True)
    ordered = labels[order]
    within = torch.arange(len(labels), device="cpu") - torch.searchsorted(ordered, ordered)
    return order[within < count].sort().values
