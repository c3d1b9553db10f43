from dcnet.data import image_folder as image_folder
from dcnet.data import load as load
from dcnet.data.batches import Augmentation, BatchDraws, Batches, Draws, augment, draw
from dcnet.data.dataset import Dataset, Split
from dcnet.data.folder_dataset import FolderDataset
from dcnet.data.load import Entry, datasets, load_dataset, register

__all__ = [
    "Augmentation",
    "BatchDraws",
    "Batches",
    "Dataset",
    "Draws",
    "Entry",
    "FolderDataset",
    "Split",
    "augment",
    "datasets",
    "draw",
    "load_dataset",
    "register",
]
