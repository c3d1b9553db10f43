"""Batches from folders of images, and of a dataset in memory that grow to their full size."""

import numpy as np
import pytest
import torch
from helpers.small_runs import tiny
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


# --- progressive sizes ---


def resized_in_loops(images, size):
    """Means of pixels, with weights that fall linearly to 0 at a distance of one new pixel from its center."""
    step = images.shape[-1] / size
    weights = torch.zeros(size, images.shape[-1], dtype=torch.float64)
    for new in range(size):
        for old in range(images.shape[-1]):
            weights[new, old] = max(0.0, 1 - abs(old + 0.5 - (new + 0.5) * step) / step)
        weights[new] /= weights[new].sum()
    return torch.einsum("yi,ncij,xj->ncyx", weights, images.double(), weights)


def digits_source(**changes):
    config = tiny(steps=8, augmentation=Augmentation(pad=1, flip=True), **changes)
    return make_source(load_dataset("digits"), config, torch.device("cpu"), (0, 1), graph=False, workers=0)


def test_progressive_images_are_those_of_the_full_size_resized():
    source, full = digits_source(progressive_sizes="3:0.25,6:0.5"), digits_source()
    for step, size in enumerate([3, 3, 6, 6, 8, 8, 8, 8]):
        seen = []
        source.train(step, lambda images, labels, seen=seen: seen.extend([images, labels]))
        expected = full.images(step)
        wanted = expected if size == 8 else resized_in_loops(expected, size)
        torch.testing.assert_close(seen[0].double(), wanted.double(), rtol=0, atol=1e-6)
        assert torch.equal(source.images(step), seen[0])
        assert torch.equal(source.images(step, full_size=True), expected)
    assert source.size_changes == [2, 4]


def test_sizes_beyond_those_of_the_dataset_and_of_folders_raise_an_error(folder):
    with pytest.raises(ValueError, match="a progressive size must be a whole number from 1 to 8, not 9"):
        digits_source(progressive_sizes="9:0.5")
    for changes in ({"progressive_sizes": "9:0.5"}, {"augmentation": Augmentation(flip=True, alternate_flips=True)}):
        config = RunConfig(dataset="imagefolder", model="resnet18", image_size=14, batch_size=8, steps=2, **changes)
        with pytest.raises(ValueError, match=r"(progressive_sizes|alternate_flips)=.* does not apply to"):
            make_source(folder, config, torch.device("cpu"), (0, 1), graph=False, workers=0)


def test_the_seed_of_a_run_draws_its_training_images():
    """All images are in one batch, without augmentation, so only the order depends on the step."""
    digits = load_dataset("digits")

    def images(seed):
        config = tiny(seed=seed, train_images=20, batch_size=20, augmentation=Augmentation())
        source = make_source(digits, config, torch.device("cpu"), (0, 1), graph=False, workers=0)
        return sorted(map(tuple, source.images(0).flatten(1).tolist()))

    assert images(0) == images(0)
    assert images(0) != images(1)
