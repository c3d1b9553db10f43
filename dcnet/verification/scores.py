"""Cosines of pairs of embeddings: of listed pairs, and of all pairs, block by block."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dcnet.arrays import Numbers, as_tensor
from dcnet.verification.embeddings import normalized, precisely

BINS = 20_000
BLOCK = 2048
PAIR_BLOCK = 1 << 16


@dataclass(frozen=True)
class ScoreHistogram:
    """How many genuine and impostor pairs, int64 [bins] each, have a score in each bin of [-1, 1]."""

    genuine: Tensor
    impostor: Tensor

    @property
    def bins(self) -> int:
        return len(self.genuine)

    def edges(self) -> Tensor:
        """The lower ends of the bins, float64."""
        return torch.arange(self.bins, dtype=torch.float64, device="cpu") * (2 / self.bins) - 1

    def __add__(self, other: "ScoreHistogram") -> "ScoreHistogram":
        if self.bins != other.bins:
            raise ValueError(f"histograms of {self.bins} and of {other.bins} bins cannot be added: bins must be alike")
        return ScoreHistogram(self.genuine + other.genuine, self.impostor + other.impostor)


@dataclass(frozen=True)
class Neighbours:
    """The highest scores float32 [N, k] of each probe, falling, and the int64 [N, k] of whom they are."""

    scores: Tensor
    indices: Tensor


def cosines(rows: Tensor, columns: Tensor) -> Tensor:
    """The cosines [R, C] of embeddings of norm 1, in full float32 whatever training left as the precision."""
    check_sizes(rows, columns)
    with precisely(), torch.autocast(rows.device.type, enabled=False):
        return (rows @ columns.T).clamp_(-1, 1)


def check_sizes(rows: Tensor, columns: Tensor) -> None:
    """Refuses embeddings of two sizes."""
    if rows.shape[1] != columns.shape[1]:
        sizes = f"{rows.shape[1]} and {columns.shape[1]}"
        raise ValueError(f"embeddings that are compared must have as many values each, not {sizes}")


def pair_scores(embeddings: Numbers, first: Numbers, second: Numbers) -> Tensor:
    """The cosines float32 [P] of pairs of embeddings.

    Args:
        embeddings: [N, D], a tensor, an array or lists.
        first: integers [P], the index of the one embedding of each pair.
        second: integers [P], of the other.
    """
    unit = normalized(embeddings)
    first, second = (_index(as_tensor(part, "indices of pairs"), len(unit)).to(unit.device) for part in (first, second))
    if first.shape != second.shape:
        raise ValueError(f"pairs need as many first as second images, not {len(first)} and {len(second)}")
    blocks = zip(first.split(PAIR_BLOCK), second.split(PAIR_BLOCK), strict=True)
    return torch.cat([(unit[left] * unit[right]).sum(1).clamp_(-1, 1) for left, right in blocks])


def score_histogram(embeddings: Numbers, labels: Numbers, bins: int = BINS, block: int = BLOCK) -> ScoreHistogram:
    """Counts the scores of every pair of two embeddings, genuine where their labels are equal.

    Args:
        embeddings: [N, D].
        labels: integers [N].
        bins: how many bins divide [-1, 1].
        block: images that are compared at a time; block x block scores are in memory.
    """
    if bins < 2:
        raise ValueError(f"bins must be at least 2, not {bins}")
    unit = normalized(embeddings)
    labels = checked_labels(labels, unit)
    every, genuine = torch.zeros(2, bins, dtype=torch.int64, device=unit.device)
    for rows in _blocks(len(unit), block):
        for columns in _blocks(len(unit), block, start=rows.start):
            places = _bin(cosines(unit[rows], unit[columns]), bins)
            same = labels[rows, None] == labels[columns]
            # On the diagonal there are pairs of one image with itself, and the others twice.
            above = torch.ones_like(same).triu_(1) if rows == columns else None
            every += torch.bincount(places.flatten() if above is None else places[above], minlength=bins)
            genuine += torch.bincount(places[same if above is None else same & above], minlength=bins)
    return ScoreHistogram(genuine.cpu(), (every - genuine).cpu())


def nearest(probes: Numbers, gallery: Numbers | None = None, count: int = 1, block: int = BLOCK) -> Neighbours:
    """The most similar images of the gallery for each probe, of equal ones any.

    Args:
        probes: embeddings [N, D].
        gallery: embeddings [G, D]; None to compare the probes with each other, and none with itself.
        count: how many are found for each probe.
        block: images that are compared at a time.
    """
    rows = normalized(probes)
    columns = rows if gallery is None else normalized(gallery).to(rows.device)
    available = len(columns) - (gallery is None)
    if not 1 <= count <= available:
        raise ValueError(f"count must be from 1 to {available}, as many as there are to compare with, not {count}")
    found = [_nearest(rows, part, columns, gallery is None, count, block) for part in _blocks(len(rows), block)]
    return Neighbours(torch.cat([scores for scores, _ in found]), torch.cat([indices for _, indices in found]))


def _nearest(probes: Tensor, part: slice, gallery: Tensor, same: bool, count: int, block: int) -> tuple[Tensor, Tensor]:
    own = torch.arange(len(probes), device=probes.device)[part, None]
    scores = torch.empty(len(own), 0, device=probes.device)
    indices = torch.empty(len(own), 0, dtype=torch.int64, device=probes.device)
    for columns in _blocks(len(gallery), block):
        found = cosines(probes[part], gallery[columns])
        at = torch.arange(len(gallery), device=probes.device)[columns].expand_as(found)
        if same:
            found = found.masked_fill(at == own, -torch.inf)
        found, local = found.topk(min(count, found.shape[1]))
        joined, at = torch.cat([scores, found], 1), torch.cat([indices, at.gather(1, local)], 1)
        scores, best = joined.topk(min(count, joined.shape[1]))
        indices = at.gather(1, best)
    return scores, indices


def checked_labels(labels: Numbers, embeddings: Tensor) -> Tensor:
    """The labels on the device of the embeddings; one whole number for each is wanted."""
    labels = as_tensor(labels, "labels")
    if labels.shape != embeddings.shape[:1] or labels.is_floating_point():
        raise ValueError(f"labels must be integers [{len(embeddings)}], not {labels.dtype} {list(labels.shape)}")
    return labels.to(embeddings.device)


def _index(index: Tensor, count: int) -> Tensor:
    if index.dim() != 1 or not len(index) or index.is_floating_point() or index.dtype == torch.bool:
        raise ValueError(f"indices of pairs must be integers [P] and not none, not {index.dtype} {list(index.shape)}")
    low, high = int(index.min()), int(index.max())
    if low < 0 or high >= count:
        raise ValueError(f"indices of pairs must be from 0 to {count - 1}, not {low if low < 0 else high}")
    # In int64, since torch takes bytes for a mask.
    return index.long()


def _blocks(count: int, block: int, start: int = 0) -> Iterator[slice]:
    if block < 1:
        raise ValueError(f"block must be at least 1, not {block}")
    return (slice(begin, min(begin + block, count)) for begin in range(start, count, block))


def _bin(scores: Tensor, bins: int) -> Tensor:
    # In int32, which is half as much to write as int64, and is counted faster.
    return (scores + 1).mul_(bins / 2).int().clamp_(0, bins - 1)
