"""Table 6: ImageNet."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from dcnet.data import FolderDataset
from dcnet.data.imagefolder import image_root
from dcnet.data.registry import data_folder
from dcnet.environment import default_workers
from dcnet.experiments.evaluations import register as register_evaluation
from dcnet.experiments.experiment import NOT_CONVERGED, Cell, Experiment, register
from dcnet.operator import PLAIN
from dcnet.training import config_of, recipe
from dcnet.training.identity import data_of

COLUMNS: dict[str, dict[str, Any]] = {
    "standard, BN": {"model": "resnet18"},
    "modified, BN": {"model": "resnet18-modified"},
    "modified, no BN": {"model": "resnet18-modified", "norm": "none"},
}
PAPER: dict[str, tuple[float | str, ...]] = {
    "baseline": (12.63, 12.10, NOT_CONVERGED),
    "sphere": (12.68, 11.55, 13.30),
    "linear": (11.99, 11.50, NOT_CONVERGED),
    "tanh": (12.47, 11.10, 12.79),
}


@register_evaluation("top-5")
@torch.no_grad()
def top_5_of(model: nn.Module, record: dict[str, Any], runs: Path, data_dir: Path | None) -> dict[str, float]:
    """The share of test images whose class is not among the five that the network takes for the likeliest."""
    own, device = config_of(record["config"]), next(model.parameters()).device
    data = data_of(record, data_dir)
    assert isinstance(data, FolderDataset)
    missed, workers = 0, default_workers()
    for images, labels in data.test_loader(own.batch_size, size=own.image_size or data.image_size, workers=workers):
        likeliest = model(images.to(device)).topk(min(5, data.num_classes)).indices
        missed += len(labels) - int((likeliest == labels.to(device)[:, None]).sum())
    return {"error": 100 * missed / len(data.val)}


def has_images(folder: Path | None) -> bool:
    """Whether there is a folder of images, of however few classes."""
    return image_root(data_folder(folder)) is not None


@register
def table6() -> Experiment:
    """ResNet-18 on ImageNet."""
    cells = [
        Cell(
            row,
            column,
            recipe("paper-imagenet", operator=PLAIN if row == "baseline" else f"{row}-cos", **changes),
            paper,
            metric=("evaluations", "top-5", "error"),
            evaluation="top-5",
        )
        for row, values in PAPER.items()
        for (column, changes), paper in zip(COLUMNS.items(), values, strict=True)
    ]
    notes = ("In the standard network the paper starts the decoupled ones from the plain one, as --pretrained does.",)
    reason = "it needs ImageNet, 1.3 million images: train/<class>/*.jpg and val/<class>/*.jpg"
    title = "Table 6: ResNet-18, ImageNet, top-5 error of the centre crop in %"
    return Experiment("table6", title, tuple(cells), not_run=reason, possible=has_images, notes=notes)
