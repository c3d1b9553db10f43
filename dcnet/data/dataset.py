"""Images and labels that lie in memory as bytes, on any device."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dcnet.data.provenance import Origin


@dataclass(frozen=True)
class Split:
    """Images uint8 [N, C, H, W] and their labels int64 [N]."""

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

    def to(self, device: torch.device | str) -> "Split":
        """The same images on the device."""
        return Split(self.images.to(device), self.labels.to(device))

    def first(self, count: int, classes: int) -> "Split":
        """A subset in which each class has its share; the same images each time, in their old order."""
        if not 1 <= count <= len(self):
            raise ValueError(f"a subset must have from 1 to {len(self)} images, not {count}")
        labels = self.labels.cpu()
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(0))
        shares = _shares(torch.bincount(labels, minlength=classes), count)
        picked = [order[labels[order] == label][:share] for label, share in enumerate(shares)]
        index = torch.cat(picked).sort().values.to(self.images.device)
        return Split(self.images[index], self.labels[index])


def _shares(sizes: Tensor, count: int) -> list[int]:
    """How many of each class: rounded down, and then one more where most was lost."""
    total = int(sizes.sum())
    shares = sizes * count // total
    lost = sizes * count % total
    more = lost.argsort(descending=True, stable=True)[: count - int(shares.sum())]
    shares[more] += 1
    found: list[int] = shares.tolist()
    return found


@dataclass(frozen=True)
class Dataset:
    """Square images to train on and to test with, and the names of the classes, in the order of the labels."""

    name: str
    train: Split
    test: Split
    classes: tuple[str, ...]
    # Set by `load_dataset`; a changed copy has none.
    origin: Origin | None = field(init=False, default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        shapes = [tuple(split.images.shape[1:]) for split in (self.train, self.test)]
        if shapes[0] != shapes[1] or shapes[0][1] != shapes[0][2]:
            raise ValueError(f"images of {self.name!r} must be square and alike, not {shapes[0]} and {shapes[1]}")
        for split in (self.train, self.test):
            if len(split) == 0 or split.labels.min() < 0 or split.labels.max() >= len(self.classes):
                raise ValueError(f"labels of {self.name!r} must be from 0 to {len(self.classes) - 1}, and not none")

    @property
    def channels(self) -> int:
        return self.train.images.shape[1]

    @property
    def image_size(self) -> int:
        return self.train.images.shape[2]

    @property
    def num_classes(self) -> int:
        return len(self.classes)
