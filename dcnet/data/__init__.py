"""Data sets by name, and the batches that training is made of; every file of this folder may register more."""

import importlib
import pkgutil

from dcnet.data.augment import Augmentation, Draws, augmented, draw
from dcnet.data.dataset import Dataset, Split
from dcnet.data.folder import FolderDataset
from dcnet.data.order import BatchDraws, Batches
from dcnet.data.registry import Entry, datasets, load_dataset, register

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")

__all__ = [
    "Augmentation",
    "BatchDraws",
    "Batches",
    "Dataset",
    "Draws",
    "Entry",
    "FolderDataset",
    "Split",
    "augmented",
    "datasets",
    "draw",
    "load_dataset",
    "register",
]
