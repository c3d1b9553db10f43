"""Classes that are never trained on."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dcnet.data.dataset import Dataset, Split
from dcnet.data.order import seeded


@dataclass(frozen=True)
class OpenSet:
    """Some classes of a data set to train on, and the others.

    Args:
        known: the classes to train on, relabelled from 0 in their old order.
        unseen: all images of the other classes, relabelled likewise, those of the training set first.
        unseen_classes: their names, in the order of the labels.
    """

    known: Dataset
    unseen: Split
    unseen_classes: tuple[str, ...]


def split_classes(dataset: Dataset, unseen: int, seed: int = 0) -> OpenSet:
    """Leaves out `unseen` classes at random; the same ones for the same seed."""
    classes = len(dataset.classes)
    if not 1 <= unseen <= classes - 2:
        raise ValueError(
            f"unseen must leave two classes to train on, from 1 to {classes - 2} of {classes}, not {unseen}"
        )
    order = torch.randperm(classes, generator=seeded(seed, 0))
    others, known = (part.sort().values for part in (order[:unseen], order[unseen:]))
    train, test = (_of_classes(split, known, classes) for split in (dataset.train, dataset.test))
    rest = [_of_classes(split, others, classes) for split in (dataset.train, dataset.test)]
    joined = Split(torch.cat([part.images for part in rest]), torch.cat([part.labels for part in rest]))
    name = f"{dataset.name}-{len(known)}-of-{classes}-seed{seed}"
    names = [tuple(dataset.classes[label] for label in part.tolist()) for part in (known, others)]
    return OpenSet(Dataset(name, train, test, names[0]), joined, names[1])


def _of_classes(split: Split, kept: Tensor, classes: int) -> Split:
    new = torch.full((classes,), -1, dtype=torch.int64)
    new[kept] = torch.arange(len(kept))
    labels = new.to(split.labels.device)[split.labels]
    inside = labels >= 0
    return Split(split.images[inside], labels[inside])
