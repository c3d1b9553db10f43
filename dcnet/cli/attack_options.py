"""What `dcnet attack` is told: an epsilon, images of a run's test set, and a source; and what is wrong with them."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from dcnet.data import FolderDataset

BATCH = 64


def epsilon_of(text: str) -> float:
    """The number of a text such as 8/255 or 0.03."""
    over, slash, under = text.partition("/")
    try:
        return float(over) / float(under) if slash else float(over)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"--epsilon must be a number or a fraction such as 8/255, not {text!r}") from None


def exact_words(epsilon: float) -> str:
    """The epsilon in words where they say it exactly, such as 8/255, and else in all its digits, such as 0.05."""
    from dcnet.robustness.checks import words_for

    words = words_for(epsilon)
    return words if epsilon_of(words) == epsilon else repr(epsilon)


def check_epsilon(epsilon: float) -> float:
    if not 0 < epsilon <= 1:
        raise ValueError(
            f"--epsilon must be above 0 and at most 1, since pixels are from 0 to 1, not {epsilon:g}: write 8/255 for "
            "8 steps of 255"
        )
    return epsilon


def check_source_run(record: dict[str, Any], other: dict[str, Any], name: str) -> None:
    """Refuses a source that was trained on other classes, or on images of another shape."""
    own, given = record["data"], other["data"]
    if own["classes"] != given["classes"]:
        raise ValueError(
            f"--source {name!r} was trained on {len(given['classes'])} classes, {_some(given['classes'])}, and not on "
            f"the {len(own['classes'])} of the run, {_some(own['classes'])}: give a run with the same classes"
        )
    shapes = [f"{data['image_size']} pixels and {data['channels']} channels" for data in (given, own)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"--source {name!r} takes images of {shapes[0]}, and the run of {shapes[1]}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def attacked_images(
    record: dict[str, Any], count: int, data_dir: Path | None, workers: int
) -> tuple[Tensor, Tensor, str]:
    """Test images uint8 [N, C, H, W] of all classes alike, their labels, and the name of the dataset."""
    from dcnet.data import FolderDataset
    from dcnet.report.evaluation import check_dataset
    from dcnet.training.identity import data_of

    dataset = data_of(record, data_dir)
    check_dataset(dataset, record)
    if isinstance(dataset, FolderDataset):
        return (*_read(dataset, record, count, workers), dataset.name)
    test = dataset.test
    chosen = test.first(count, dataset.num_classes) if count < len(test) else test
    return chosen.images, chosen.labels, dataset.name


def fingerprint_of(images: Tensor, labels: Tensor) -> str:
    """What tells images and their labels from others, such as those of a folder that has changed."""
    found = hashlib.sha256(repr((images.dtype, images.shape)).encode())
    for part in (images, labels):
        found.update(part.contiguous().numpy().data)
    return found.hexdigest()


def _read(dataset: FolderDataset, record: dict[str, Any], count: int, workers: int) -> tuple[Tensor, Tensor]:
    """Images of a folder at equal distances, which takes as many of each class, since they lie class by class."""
    import torch

    files = dataset.val
    index = torch.linspace(0, len(files) - 1, min(count, len(files))).round().long()
    chosen = dataclasses.replace(files, names=files.names[index.numpy()], labels=files.labels[index])
    some = dataclasses.replace(dataset, val=chosen)
    loader = some.test_loader(BATCH, size=record["data"]["image_size"], workers=workers)
    images, labels = zip(*loader, strict=True)
    return torch.cat(images), torch.cat(labels)
