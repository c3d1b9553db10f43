"""Table 6: ImageNet."""

from pathlib import Path

import torch
from torch import nn

from dcnet.data import FolderDataset
from dcnet.data.image_folder import find_image_root
from dcnet.data.load import data_folder
from dcnet.environment import default_workers
from dcnet.experiments.experiment import NOT_CONVERGED, Columns, Experiment, paper_grid, register, register_evaluation
from dcnet.training import Record
from dcnet.training.identity import load_run_data

COLUMNS: Columns = {
    "standard, BN": ("cos", {"model": "resnet18"}),
    "modified, BN": ("cos", {"model": "resnet18-modified"}),
    "modified, no BN": ("cos", {"model": "resnet18-modified", "norm": "none"}),
}
TABLE_6: dict[str, tuple[float | str, ...]] = {
    "baseline": (12.63, 12.10, NOT_CONVERGED),
    "sphere": (12.68, 11.55, 13.30),
    "linear": (11.99, 11.50, NOT_CONVERGED),
    "tanh": (12.47, 11.10, 12.79),
}


@register_evaluation("top-5")
@torch.no_grad()
def top_5_of(model: nn.Module, record: Record, runs: Path, data_dir: Path | None) -> dict[str, float]:
    """Returns the top-5 error on the test images in %."""
    own, device = record.run_config(), next(model.parameters()).device
    data = load_run_data(record, data_dir)
    assert isinstance(data, FolderDataset)
    missed, workers = 0, default_workers()
    for images, labels in data.test_loader(own.batch_size, size=own.image_size or data.image_size, workers=workers):
        top_5 = model(images.to(device)).topk(min(5, data.num_classes)).indices
        missed += len(labels) - int((top_5 == labels.to(device)[:, None]).sum())
    return {"error": 100 * missed / len(data.val)}


def has_images(folder: Path | None) -> bool:
    """Whether the data folder contains a folder of images, with any number of classes."""
    return find_image_root(data_folder(folder)) is not None


@register
def table6() -> Experiment:
    """ResNet-18 on ImageNet."""
    metric = ("evaluations", "top-5", "error")
    cells = paper_grid("paper-imagenet", COLUMNS, TABLE_6, metric=metric, evaluation="top-5")
    notes = ("The paper initializes decoupled standard networks from the plain one; --pretrained does this.",)
    reason = "it needs ImageNet (1.3 million images) as train/<class>/*.jpg and val/<class>/*.jpg"
    title = "Table 6: ResNet-18, ImageNet, top-5 error of the center crop in %"
    return Experiment("table6", title, cells, not_run=reason, possible=has_images, notes=notes)
