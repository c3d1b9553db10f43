"""Retrieval: how high a ranking of the gallery by cosine places images of the same class."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dcnet.arrays import Numbers
from dcnet.verification.embeddings import normalized
from dcnet.verification.scores import check_sizes, checked_labels

KS = (1, 5, 10)
# Scores that are ranked at a time.
AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Retrieved:
    """How well queries find images of their class in a gallery; shares from 0 to 1.

    Args:
        recall: for each k the share of queries with an image of their class among the k most similar.
        mean_average_precision: the mean over the queries of the average precision of the whole ranking (mAP).
        queries: how many queries count: those with an image of their class in the gallery.
        unmatched: how many have none, and do not count.
        gallery: how many images a query is compared with.
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

    Equal scores count against: of images with the same score, those of other classes rank first, so that a network
    that gives the same for all images finds nothing early. A query without an image of its class in the gallery does
    not count. A k beyond the gallery takes all of it, which finds everything.

    Args:
        embeddings: of the queries, [N, D].
        labels: of the queries, integers [N].
        gallery: embeddings [G, D]; None to compare the queries with each other, and none with itself.
        gallery_labels: integers [G], given if and only if a gallery is.
        ks: how many of the most similar images are looked at, for recall@k.
    """
    _check_ks(ks)
    if (gallery is None) != (gallery_labels is None):
        raise ValueError("gallery and gallery_labels go together: give both, or none")
    rows = normalized(embeddings)
    labels = checked_labels(labels, rows)
    columns = rows if gallery is None else normalized(gallery).to(rows.device)
    check_sizes(rows, columns)
    owners = labels if gallery is None else checked_labels(gallery_labels, columns)
    rows, columns = rows.double(), columns.double()
    found = [
        _ranked(rows[part], labels[part], columns, owners, part if gallery is None else None)
        for part in torch.arange(len(rows), device=rows.device).split(max(1, AT_ONCE // len(columns)))
    ]
    first, precision = (torch.cat(parts) for parts in zip(*found, strict=True))
    return _summary(first, precision, tuple(ks), len(columns) - (gallery is None))


def _ranked(rows: Tensor, labels: Tensor, columns: Tensor, owners: Tensor, own: Tensor | None) -> tuple[Tensor, Tensor]:
    """The rank of the first match of each query, from 1, and its average precision, both float64; 0 without a match.

    `own` are the places of the queries in the gallery where they are in it.
    """
    # In float64 and then rounded, so that equal embeddings have equal scores whatever is computed beside them.
    scores, right = (rows @ columns.T).float(), labels[:, None] == owners
    if own is not None:
        # Last, and no match.
        scores.scatter_(1, own[:, None], -torch.inf)
        right.scatter_(1, own[:, None], False)
    # Others first, and then by score, which leaves those with equal scores in this order.
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
        raise ValueError(f"none of the {len(first):,} queries has an image of its class in the gallery: give such ones")
    return Retrieved(
        recall={int(k): float((first[matched] <= k).double().mean()) for k in ks},
        mean_average_precision=float(precision[matched].mean()),
        queries=queries,
        unmatched=len(first) - queries,
        gallery=gallery,
    )


def _check_ks(ks: Sequence[int]) -> None:
    if not ks:
        raise ValueError("ks must be one number or more, such as (1, 5, 10), not none")
    for k in ks:
        if isinstance(k, bool) or int(k) != k or k < 1:
            raise ValueError(f"each of ks must be a whole number, 1 or more, not {k!r}")
