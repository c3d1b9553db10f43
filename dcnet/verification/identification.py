"""Identification of probes in a gallery, of a closed or an open set, and retrieval of images of the same class."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dcnet.checks import Numbers, check_choice, check_whole
from dcnet.verification.embeddings import BLOCK, check_sizes, checked_labels, cosines, normalized
from dcnet.verification.roc_curve import check_rate, roc, unresolved

POOLS = ("max", "mean")


@dataclass(frozen=True)
class Identified:
    """The most similar person in the gallery for each of N probes.

    Args:
        scores: the score of that person, float32 [N].
        people: the label of that person, int64 [N]; the smallest label for equal scores.
        ranks: the rank of the right person, int64 [N]: 1 for the first, after people with the same score; 0 if the
            right person is not in the gallery.
    """

    scores: Tensor
    people: Tensor
    ranks: Tensor

    @property
    def known(self) -> Tensor:
        """Whether the right person is in the gallery, bool [N]."""
        return self.ranks > 0


@dataclass(frozen=True)
class OpenSetRate:
    """The true positive identification rate at a false positive identification rate of at most `fpir`.

    Args:
        fpir: the share of unknown probes that may be accepted.
        tpir: the share of known probes that are accepted and identified correctly; None with too few unknown probes.
        threshold: the lowest score that is accepted, or None.
        known: the number of probes of people in the gallery.
        unknown: the number of other probes.
        note: the reason if `tpir` is None, as a sentence.
    """

    fpir: float
    tpir: float | None
    threshold: float | None
    known: int
    unknown: int
    note: str = ""


def identify(
    probes: Numbers,
    probe_people: Numbers,
    gallery: Numbers,
    gallery_people: Numbers,
    pool: str = "max",
    block: int = BLOCK,
) -> Identified:
    """Compares every probe with every person of the gallery, in blocks of block x block scores.

    Args:
        probes: embeddings [N, D].
        probe_people: labels of the probes, integers [N].
        gallery: embeddings [G, D].
        gallery_people: labels, integers [G].
        pool: the score of a person: "max" or "mean" of the scores of the person's images.
        block: images per block.
    """
    check_choice("pool", pool, POOLS)
    check_whole("block", block, 1)
    rows = normalized(probes)
    columns = normalized(gallery).to(rows.device)
    probe_people, gallery_people = checked_labels(probe_people, rows), checked_labels(gallery_people, columns)
    people, owner = gallery_people.unique(return_inverse=True)
    if pool == "mean":
        # The mean of cosines is the product with the mean embedding.
        columns, owner = _means(columns, owner, len(people)), torch.arange(len(people), device=owner.device)
    step = max(1, min(block, block * block // len(people)))
    parts = zip(rows.split(step), probe_people.split(step), strict=True)
    found = [_answers(_by_person(part, columns, owner, len(people), block), who, people) for part, who in parts]
    return Identified(*(torch.cat(column) for column in zip(*found, strict=True)))


def cmc(found: Identified, ranks: int = 10) -> tuple[float, ...]:
    """Closed set: for k = 1, 2, ..., the share of probes whose person is among the k most similar; ties rank last.

    Args:
        found: the result of `identify`; the gallery must have the person of every probe.
        ranks: the largest k.
    """
    check_whole("ranks", ranks, 1)
    if not len(found.ranks):
        raise ValueError("there are no probes: identify one or more")
    if strangers := int((~found.known).sum()):
        raise ValueError(
            f"the gallery must have the person of every probe, but {strangers} of {len(found.ranks)} are not in it: "
            "leave them out, or use `open_set_rate`"
        )
    return tuple(float((found.ranks <= rank).double().mean()) for rank in range(1, ranks + 1))


def open_set_rate(found: Identified, fpir: float = 0.01) -> OpenSetRate:
    """Open set: the share of known probes that are accepted and identified correctly.

    Args:
        found: the result of `identify` for known and unknown probes.
        fpir: the share of unknown probes that the threshold may accept.
    """
    check_rate("fpir", fpir)
    known = int(found.known.sum())
    unknown = len(found.known) - known
    if not (known and unknown):
        raise ValueError(f"an open set needs known and unknown probes, not {known} and {unknown}")
    if note := unresolved(fpir, unknown, "unknown probes"):
        return OpenSetRate(fpir, None, None, known, unknown, note)
    curve = roc(found.scores, found.known)
    threshold = float(curve.thresholds[curve.lowest(fpir)])
    right = (found.ranks == 1) & (found.scores.double() >= threshold)
    return OpenSetRate(fpir, int(right.sum()) / known, threshold, known, unknown)


def _means(columns: Tensor, owner: Tensor, people: int) -> Tensor:
    sums = torch.zeros(people, columns.shape[1], dtype=columns.dtype, device=columns.device)
    return sums.index_add_(0, owner, columns) / owner.bincount(minlength=people)[:, None]


def _by_person(rows: Tensor, columns: Tensor, owner: Tensor, people: int, block: int) -> Tensor:
    """The highest score of each person, [R, people]."""
    best = torch.full((len(rows), people), -torch.inf, device=rows.device)
    for part, owners in zip(columns.split(block), owner.split(block), strict=True):
        scores = cosines(rows, part)
        best.scatter_reduce_(1, owners.expand_as(scores), scores, "amax")
    return best


def _answers(scores: Tensor, who: Tensor, people: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each probe the best score, its person, and the rank of the right person, 0 if not in the gallery."""
    best, first = scores.max(1)
    right = people == who[:, None]
    own = scores.masked_fill(~right, -torch.inf).amax(1)
    ahead = ((scores >= own[:, None]) & ~right).sum(1)
    return best, people[first], torch.where(right.any(1), ahead + 1, 0)


KS = (1, 5, 10)
# Scores ranked at a time.
RANKED = 1 << 22


@dataclass(frozen=True)
class Retrieved:
    """Retrieval of images of the same class from a gallery; shares from 0 to 1.

    Args:
        recall: for each k the share of queries with an image of their class among the k most similar.
        mean_average_precision: the mean over the queries of the average precision of the whole ranking (mAP).
        queries: the number of queries with an image of their class in the gallery; only these count.
        unmatched: the number of other queries.
        gallery: the number of images that a query is compared with.
    """

    recall: dict[int, float]
    mean_average_precision: float
    queries: int
    unmatched: int
    gallery: int


def retrieve(
    embeddings: Numbers,
    labels: Numbers,
    gallery: Numbers | None = None,
    gallery_labels: Numbers | None = None,
    ks: Sequence[int] = KS,
) -> Retrieved:
    """Recall@k and mean average precision of a ranking by cosine.

    Among equal scores, images of other classes rank first, so that constant embeddings have no early matches. Queries
    without an image of their class in the gallery do not count. A k above the size of the gallery means all of it.

    Args:
        embeddings: embeddings of the queries, [N, D].
        labels: labels of the queries, integers [N].
        gallery: embeddings [G, D]; None to compare every query with the other queries.
        gallery_labels: integers [G]; required with a gallery.
        ks: the values of k for recall@k.
    """
    if not ks:
        raise ValueError("ks is empty: give one number or more, such as (1, 5, 10)")
    for k in ks:
        check_whole("each of ks", k, 1)
    if (gallery is None) != (gallery_labels is None):
        raise ValueError("gallery and gallery_labels go together: give both, or neither")
    rows = normalized(embeddings)
    labels = checked_labels(labels, rows)
    columns = rows if gallery is None else normalized(gallery).to(rows.device)
    check_sizes(rows, columns)
    owners = labels if gallery is None else checked_labels(gallery_labels, columns)
    rows, columns = rows.double(), columns.double()
    found = [
        _ranked(rows[part], labels[part], columns, owners, part if gallery is None else None)
        for part in torch.arange(len(rows), device=rows.device).split(max(1, RANKED // len(columns)))
    ]
    first, precision = (torch.cat(parts) for parts in zip(*found, strict=True))
    return _summary(first, precision, tuple(ks), len(columns) - (gallery is None))


def _ranked(rows: Tensor, labels: Tensor, columns: Tensor, owners: Tensor, own: Tensor | None) -> tuple[Tensor, Tensor]:
    """The rank of the first match of each query, from 1, and its average precision, both float64; 0 without a match.

    `own` holds the indices of the queries in the gallery, if they are part of it.
    """
    # Computed in float64 and then rounded, so that equal embeddings have equal scores in every block.
    scores, right = (rows @ columns.T).float(), labels[:, None] == owners
    if own is not None:
        # A query ranks last in its own ranking, and is not a match.
        scores.scatter_(1, own[:, None], -torch.inf)
        right.scatter_(1, own[:, None], False)
    # Sort other classes first, then by score with a stable sort, so that they stay first among equal scores.
    others_first = right.byte().argsort(dim=1, stable=True)
    order = scores.gather(1, others_first).argsort(dim=1, descending=True, stable=True)
    right = right.gather(1, others_first.gather(1, order))
    ranks = torch.arange(1, len(columns) + 1, dtype=torch.float64, device=rows.device)
    count = right.sum(1)
    precision = (right.cumsum(1) / ranks * right).sum(1) / count.clamp(min=1)
    first = (right.byte().argmax(1) + 1) * (count > 0)
    return first.double(), precision


def _summary(first: Tensor, precision: Tensor, ks: tuple[int, ...], gallery: int) -> Retrieved:
    matched = first > 0
    queries = int(matched.sum())
    if not queries:
        raise ValueError(
            f"none of the {len(first):,} queries has an image of its class in the gallery: give such images"
        )
    return Retrieved(
        recall={int(k): float((first[matched] <= k).double().mean()) for k in ks},
        mean_average_precision=float(precision[matched].mean()),
        queries=queries,
        unmatched=len(first) - queries,
        gallery=gallery,
    )
