"""Who is it? Probes against a gallery of people, all of whom are known (closed set), or not (open set)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dcnet.arrays import Numbers
from dcnet.verification.curves import check_rate, roc, unresolved
from dcnet.verification.embeddings import normalized
from dcnet.verification.scores import BLOCK, checked_labels, cosines

POOLS = ("max", "mean")


@dataclass(frozen=True)
class Identified:
    """What a gallery says of each of N probes.

    Args:
        scores: float32 [N], of the most similar person.
        people: int64 [N], the label of that person, of equal ones the smallest.
        ranks: int64 [N], of the right person, from 1; people who score the same come before. 0 where the right person
            is not in the gallery.
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
    """The share of known probes that are accepted and right, where at most `fpir` of the unknown ones are accepted.

    Args:
        fpir: the rate that was asked for.
        tpir: the share; None where there are too few unknown probes to tell.
        threshold: a probe is accepted from there on; None where there is none to tell.
        known: how many probes are of people in the gallery.
        unknown: how many are not.
        note: why there is none, in a sentence.
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
        probe_people: integers [N], who they are.
        gallery: embeddings [G, D].
        gallery_people: integers [G].
        pool: the score of a person: "max" or "mean" of the scores of the images of that person.
        block: images that are compared at a time.
    """
    if pool not in POOLS:
        raise ValueError(f"pool must be one of {', '.join(POOLS)}, not {pool!r}")
    if block < 1:
        raise ValueError(f"block must be at least 1, not {block}")
    rows = normalized(probes)
    columns = normalized(gallery).to(rows.device)
    probe_people, gallery_people = checked_labels(probe_people, rows), checked_labels(gallery_people, columns)
    people, owner = gallery_people.unique(return_inverse=True)
    if pool == "mean":
        # The mean of the cosines is the product with the mean; then there is one column for each person.
        columns, owner = _means(columns, owner, len(people)), torch.arange(len(people), device=owner.device)
    step = max(1, min(block, block * block // len(people)))
    parts = zip(rows.split(step), probe_people.split(step), strict=True)
    found = [_answers(_by_person(part, columns, owner, len(people), block), who, people) for part, who in parts]
    return Identified(*(torch.cat(column) for column in zip(*found, strict=True)))


def cmc(found: Identified, ranks: int = 10) -> tuple[float, ...]:
    """Closed set: the shares of probes whose person is among the first 1, 2, ... of the gallery; ties count against.

    Args:
        found: what `identify` gave; the gallery must have the person of every probe.
        ranks: how many shares there are.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, not {ranks}")
    if not len(found.ranks):
        raise ValueError("there are no probes, and so no shares of them: identify one or more")
    if strangers := int((~found.known).sum()):
        raise ValueError(
            f"the gallery must have the person of every probe, but {strangers} of {len(found.ranks)} are not in it: "
            "leave them out, or see `open_set_rate`"
        )
    return tuple(float((found.ranks <= rank).double().mean()) for rank in range(1, ranks + 1))


def open_set_rate(found: Identified, fpir: float = 0.01) -> OpenSetRate:
    """Open set: the share of known probes that are accepted and identified correctly.

    Args:
        found: what `identify` gave, of known and of unknown probes.
        fpir: the threshold is the lowest one that accepts at most this share of the unknown probes.
    """
    check_rate("fpir", fpir)
    known = int(found.known.sum())
    unknown = len(found.known) - known
    if not (known and unknown):
        raise ValueError(f"an open set needs known and unknown probes, not {known} and {unknown} of them")
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
    """The highest score of each person's columns, [R, people]."""
    best = torch.full((len(rows), people), -torch.inf, device=rows.device)
    for part, owners in zip(columns.split(block), owner.split(block), strict=True):
        scores = cosines(rows, part)
        best.scatter_reduce_(1, owners.expand_as(scores), scores, "amax")
    return best


def _answers(scores: Tensor, who: Tensor, people: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Best score, best person, and rank of the right one, which is 0 where there is none."""
    best, first = scores.max(1)
    right = people == who[:, None]
    own = scores.masked_fill(~right, -torch.inf).amax(1)
    ahead = ((scores >= own[:, None]) & ~right).sum(1)
    return best, people[first], torch.where(right.any(1), ahead + 1, 0)
