"""Pairs of images by their classes, drawn at random."""

import math

import torch
from torch import Tensor

from dcnet.arrays import Numbers, as_tensor
from dcnet.data.order import seeded
from dcnet.verification.pairs import Pairs

# More pairs of one class are not put in order before some are taken: those of 100,000 images would take 40 GB.
ALL_AT_ONCE = 2**24


def sample_pairs(labels: Numbers, count: int, seed: int = 0) -> Pairs:
    """Random pairs of images by their labels: half of one class, half of two, and none twice.

    Those of one class are divided evenly among the classes, as far as these have enough; those of two are any.

    Args:
        labels: integers [N].
        count: how many pairs, an even number.
        seed: the same seed gives the same pairs.
    """
    if count < 2 or count % 2:
        raise ValueError(f"count must be even and at least 2, for pairs of both kinds, not {count}")
    labels = as_tensor(labels, "labels").cpu()
    if labels.dim() != 1 or labels.is_floating_point():
        raise ValueError(f"labels must be integers [N], not {labels.dtype} {list(labels.shape)}")
    genuine = _genuine(labels, count // 2, seeded(seed, 1))
    impostor = _impostor(labels, count // 2, seeded(seed, 2))
    both = torch.cat([genuine, impostor])
    same = torch.arange(count, device="cpu") < count // 2
    return Pairs(both[:, 0].contiguous(), both[:, 1].contiguous(), same)


def _genuine(labels: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Pairs [count, 2] of one class each, as even as can be among the classes."""
    members = [(labels == label).nonzero()[:, 0] for label in labels.unique()]
    possible = [math.comb(len(of_class), 2) for of_class in members]
    shares = _even_shares(possible, count)
    found = []
    for of_class, total, share in zip(members, possible, shares, strict=True):
        if share:
            found.append(of_class[_pair_of_rank(_drawn(total, share, generator))])
    return torch.cat(found)


def _drawn(total: int, count: int, generator: torch.Generator) -> Tensor:
    """`count` different numbers from 0 to less than `total`."""
    if total <= ALL_AT_ONCE:
        return torch.randperm(total, generator=generator, device="cpu")[:count]
    found: dict[int, None] = {}
    while len(found) < count:
        found.update(dict.fromkeys(torch.randint(total, (count,), generator=generator, device="cpu").tolist()))
    return torch.tensor(list(found)[:count], device="cpu")


def _even_shares(possible: list[int], count: int) -> list[int]:
    """How many of each class, with `count` in all: the same from all that have so many, else all that they have."""
    if sum(possible) < count:
        raise ValueError(f"there are {sum(possible):,} pairs of one class, and not {count:,}: ask for fewer")
    shares, left = [0] * len(possible), count
    order = sorted(range(len(possible)), key=possible.__getitem__)
    for place, label in enumerate(order):
        shares[label] = min(possible[label], left // (len(order) - place))
        left -= shares[label]
    return shares


def _pair_of_rank(rank: Tensor) -> Tensor:
    """The pairs (i, j) with i < j, counted as (0, 1), (0, 2), (1, 2), (0, 3), ..., at these places, [len(rank), 2]."""
    high = ((1 + (1 + 8 * rank.double()).sqrt()) / 2).long()
    return torch.stack([rank - high * (high - 1) // 2, high], dim=1)


def _impostor(labels: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Pairs [count, 2] of two classes each."""
    images = len(labels)
    possible = math.comb(images, 2) - sum(math.comb(int(size), 2) for size in labels.unique(return_counts=True)[1])
    if possible < count:
        raise ValueError(f"there are {possible:,} pairs of two classes, and not {count:,}: ask for fewer")
    found: dict[int, None] = {}
    while len(found) < count:
        drawn = torch.randint(images, (2 * count, 2), generator=generator, device="cpu").sort(1).values
        drawn = drawn[labels[drawn[:, 0]] != labels[drawn[:, 1]]]
        # A dictionary keeps the order in which they were drawn, so that none is likelier than another.
        found.update(dict.fromkeys((drawn[:, 0] * images + drawn[:, 1]).tolist()))
    keys = torch.tensor(list(found)[:count], device="cpu")
    return torch.stack([keys // images, keys % images], dim=1)
