"""Batches from folders of images."""

import numpy as np
import pytest
import torch
from PIL import Image

from dcnet.data import Augmentation, load_dataset
from dcnet.training import RunConfig
from dcnet.training.sources import make_source


@pytest.fixture
def folder(tmp_path):
    chance = np.random.default_rng(0)
    for part in ("train", "val"):
        (tmp_path / part / "noise").mkdir(parents=True)
        for number in range(8):
            pixels = chance.integers(0, 256, (20, 20, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / part / "noise" / f"{number}.png")
    return load_dataset("imagefolder", tmp_path)


def source_of(folder, flip):
    augmentation = Augmentation(flip=flip)
    config = RunConfig(
        dataset="imagefolder", model="cnn9", image_size=14, batch_size=8, steps=1, augmentation=augmentation
    )
    return make_source(folder, config, torch.device("cpu"), (0, 1), graph=False, workers=0)


def first_batch(folder, flip):
    seen = []
    source = source_of(folder, flip)
    source.train(0, lambda images, labels: seen.append(images))
    assert torch.equal(source.images(0), seen[0])
    return seen[0]


def test_images_of_a_folder_are_flipped_if_enabled(folder):
    kept, either = first_batch(folder, flip=False), first_batch(folder, flip=True)
    mirrored = [torch.equal(one, two.flip(-1)) for one, two in zip(either, kept, strict=True)]
    same = [torch.equal(one, two) for one, two in zip(either, kept, strict=True)]
    assert same == [not flipped for flipped in mirrored]
    assert 0 < sum(mirrored) < 8


@pytest.mark.parametrize("name", ["brightness", "contrast"])
def test_a_folder_has_no_random_light(folder, name):
    config = RunConfig(dataset="imagefolder", steps=1, augmentation=Augmentation(**{name: 0.5}))
    with pytest.raises(ValueError, match=f"{name}=0.5 does not apply to imagefolder, a folder of images"):
        make_source(folder, config, torch.device("cpu"), (0, 1), graph=False, workers=0)


def test_test_images_of_a_folder_are_deterministic(folder):
    source = source_of(folder, flip=True)
    (first, labels), *rest = source.test()
    assert not rest
    assert torch.equal(first, next(iter(source.test()))[0])
    assert labels.tolist() == [0] * 8
