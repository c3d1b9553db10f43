"""Images and labels in memory as bytes, on any device."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dcnet.checks import check_whole

FINGERPRINT_DIGITS = 16


@dataclass(frozen=True)
class Origin:
    """How `load_dataset` found a dataset.

    Attributes:
        name: its name in the registry.
        folder: the folder of its files, if the contents depend on the user's folder.
        fingerprint: a hash of its contents, in the same case.
    """

    name: str
    folder: Path | None = None
    fingerprint: str | None = None


def hash_classes(classes: tuple[str, ...]) -> Any:
    """The start of a fingerprint: SHA-256 over the names of the classes."""
    return hashlib.sha256("\n".join(classes).encode("utf-8", "surrogateescape"))


@dataclass(frozen=True)
class Split:
    """Images uint8 [N, C, H, W] and labels int64 [N]."""

    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        shape, labels = tuple(self.images.shape), tuple(self.labels.shape)
        if self.images.dtype != torch.uint8 or len(shape) != 4 or not self.images.is_contiguous():
            raise ValueError(f"images must be contiguous uint8 [N, C, H, W], not {self.images.dtype} {list(shape)}")
        if self.labels.dtype != torch.int64 or labels != shape[:1]:
            raise ValueError(f"labels must be int64 [{shape[0]}], not {self.labels.dtype} {list(labels)}")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Tensor | Sequence[int]) -> "Split":
        """The images at these indices, or where a mask is true."""
        return Split(self.images[index], self.labels[index])

    def to(self, device: torch.device | str) -> "Split":
        return Split(self.images.to(device), self.labels.to(device))

    def subset(self, count: int, classes: int, seed: int = 0) -> "Split":
        """`count` images with the classes in proportion, the same ones for the same seed, in their original order."""
        check_whole("the size of a subset", count, 1, len(self))
        labels = self.labels.cpu()
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        counts = _proportional(torch.bincount(labels, minlength=classes), count)
        picked = [order[labels[order] == label][:number] for label, number in enumerate(counts)]
        return self[torch.cat(picked).sort().values.to(self.images.device)]


def _proportional(sizes: Tensor, count: int) -> list[int]:
    """`count` divided in proportion to the sizes: rounded down, the rest to the largest remainders."""
    total = int(sizes.sum())
    shares, remainders = sizes * count // total, sizes * count % total
    shares[remainders.argsort(descending=True, stable=True)[: count - int(shares.sum())]] += 1
    return shares.tolist()


@dataclass(frozen=True)
class Dataset:
    """Square images for training and test, and the class names in the order of the labels."""

    name: str
    train: Split
    test: Split
    classes: tuple[str, ...]
    # Set by `load_dataset`; a modified copy has none.
    origin: Origin | None = field(init=False, default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        shapes = [tuple(split.images.shape[1:]) for split in (self.train, self.test)]
        if shapes[0] != shapes[1] or shapes[0][1] != shapes[0][2]:
            raise ValueError(
                f"images of {self.name!r} must be square and of one shape, not {shapes[0]} and {shapes[1]}"
            )
        for split in (self.train, self.test):
            if len(split) == 0 or split.labels.min() < 0 or split.labels.max() >= len(self.classes):
                raise ValueError(
                    f"labels of {self.name!r} must be from 0 to {len(self.classes) - 1}, at least one in each split"
                )

    @property
    def channels(self) -> int:
        return self.train.images.shape[1]

    @property
    def image_size(self) -> int:
        return self.train.images.shape[2]

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    def fingerprint(self) -> str:
        """A hash of class names, pixels and labels."""
        digest = hash_classes(self.classes)
        for split in (self.train, self.test):
            digest.update(repr(tuple(split.images.shape)).encode())
            for tensor in (split.images, split.labels):
                digest.update(tensor.cpu().numpy().data)
        return str(digest.hexdigest()[:FINGERPRINT_DIGITS])
