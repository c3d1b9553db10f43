"""ImageNet's table: not run without a folder of images, and by the five likeliest classes with one."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from dcnet.experiments import chosen
from dcnet.experiments.catalogue.table6 import top_5_of
from dcnet.training import RunConfig

CLASSES, PER_CLASS = 8, 2


@pytest.fixture
def images(tmp_path):
    """The shade of an image is its class, of eight."""
    for part in ("train", "val"):
        for label in range(CLASSES):
            folder = tmp_path / part / f"class{label}"
            folder.mkdir(parents=True)
            for number in range(PER_CLASS):
                Image.fromarray(np.full((16, 16, 3), 30 * label, np.uint8)).save(folder / f"{number}.png")
    return tmp_path


class Likes(nn.Module):
    """Takes every image for one of the classes that are within so many of its own, and the lower the likelier."""

    def __init__(self, favourites):
        super().__init__()
        self.favourites, self.weight = favourites, nn.Parameter(torch.zeros(()))

    def forward(self, x):
        scores = torch.zeros(len(x), CLASSES)
        scores[:, self.favourites] = torch.arange(len(self.favourites), 0, -1.0)
        return scores + self.weight


@pytest.mark.parametrize(("favourites", "error"), [([0, 1, 2, 3, 4], 37.5), ([7, 6, 5, 0, 1, 2, 3, 4], 37.5)])
def test_the_five_likeliest_count(images, favourites, error):
    config = RunConfig(dataset="imagefolder", model="resnet18", image_size=14, batch_size=5, steps=1)
    found = top_5_of(Likes(favourites), {"config": config.described()}, images, images)
    assert found == {"error": error}


def test_it_is_run_where_there_is_a_folder_of_images(images, tmp_path):
    (table,) = chosen(["table6"])
    assert "it needs ImageNet" in table.not_run
    assert table.with_data(tmp_path / "nowhere").not_run == table.not_run
    assert table.with_data(images).not_run is None
    assert {cell.metric for cell in table.cells} == {("evaluations", "top-5", "error")}
