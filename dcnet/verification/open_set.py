"""Classes that nobody trained on: are two images of the same one, of which is it, and is it one of them at all?"""

from pathlib import Path

import torch
from torch import Tensor, nn

from dcnet.data.cifar_open import cifar100_open
from dcnet.data.dataset import Split
from dcnet.data.open_set import OpenSet
from dcnet.verification.curves import roc
from dcnet.verification.embeddings import embed
from dcnet.verification.identification import Identified, cmc, identify, open_set_rate
from dcnet.verification.measures import Record, counted, curve_measures, measured
from dcnet.verification.protocol import make_folds
from dcnet.verification.sampling import sample_pairs
from dcnet.verification.scores import pair_scores

BATCH = 1000
PAIRS = 20_000
# Images of each class in the gallery: of unseen classes few, as one enrols them, of known ones as many as tell enough.
ENROLLED, KNOWN = 10, 50
FPIRS = (0.01, 0.1)


def evaluate_open_set(
    model: nn.Module, folder: Path | str | None = None, device: torch.device | str = "cpu", download: bool = True
) -> Record:
    """What a network that was trained on `cifar100-open` makes of the other 20 classes, as plain values for a record.

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
    """All by the angles of embeddings, each of which is computed once; shares from 0 to 1.

    - "verification": of sampled pairs of the unseen classes, half of them of one class.
    - "identification": some images of each unseen class are its gallery, all others are probes. "ranks" are with the
      galleries of all classes; "open" has those of every other class, and probes of the rest are strangers.
    - "detection": training images of the known classes are the gallery; known is whoever is in the test set, and all
      images of unseen classes are strangers.

    Args:
        model: has `features`.
        parts: known and unseen classes.
        device: where it is computed.
        pairs: how many are sampled.
        enrolled: images of each unseen class in its gallery.
        known: images of each known class in the gallery.
    """
    unseen = embed(model, parts.unseen.images.split(BATCH), device)
    chosen = first_of_each(parts.known.train.labels, known)
    gallery = Split(parts.known.train.images[chosen], parts.known.train.labels[chosen])
    of_gallery, of_test = (embed(model, part.images.split(BATCH), device) for part in (gallery, parts.known.test))
    probes = torch.cat([of_test, unseen])
    # Strangers have numbers that no class of the gallery has.
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
    return {**counted(pairs), **measured(scores, pairs.same, make_folds(pairs.same))}


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
    """Whether a probe is of a known class at all, by the score of the most similar one; and which it is."""
    known = found.known
    right = int((found.ranks == 1).sum()) / int(known.sum())
    counts = {"gallery": gallery, "known": int(known.sum()), "unknown": int((~known).sum())}
    return {**counts, "rank_1_of_known": right, **curve_measures(roc(found.scores, known)), "open": _rates(found)}


def _rates(found: Identified) -> list[Record]:
    return [vars(open_set_rate(found, fpir)) for fpir in FPIRS]


def first_of_each(labels: Tensor, count: int) -> Tensor:
    """The places of the first images of each class, as many as it has up to `count`, int64, rising."""
    order = labels.argsort(stable=True)
    ordered = labels[order]
    within = torch.arange(len(labels), device="cpu") - torch.searchsorted(ordered, ordered)
    return order[within < count].sort().values
