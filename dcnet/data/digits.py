"""The handwritten digits that come with scikit-learn: the smallest data set, and there without a download."""

from pathlib import Path

import torch

from dcnet.data.dataset import Dataset, Split
from dcnet.data.registry import register

TRAINING_IMAGES = 600


@register("digits", "handwritten digits, 8 x 8, grey, 10 classes, 600 + 1,197 images; comes with scikit-learn")
def load(folder: Path | None = None, download: bool = False) -> Dataset:
    """Few images to train on, with each class in proportion, since all would be too easy; needs no folder."""
    # It takes a second to import, and all other data sets do without it.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, classes = load_digits(return_X_y=True)
    # From 16 grey levels to bytes.
    images = torch.tensor(pixels * 255 / 16).round().to(torch.uint8).view(-1, 1, 8, 8)
    labels = torch.tensor(classes, dtype=torch.int64)
    train, test = train_test_split(range(len(images)), train_size=TRAINING_IMAGES, random_state=0, stratify=classes)
    splits = [Split(images[index], labels[index]) for index in (train, test)]
    return Dataset("digits", splits[0], splits[1], tuple("0123456789"))
