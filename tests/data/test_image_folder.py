"""Folders of images: layouts, decoding, order, splits and errors."""

import dataclasses
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.data_files import pixels, sentence_of
from helpers.lfw_folder import write_image
from PIL import Image

from dcnet.data import FolderDataset, decode, folder_dataset, load_dataset
from dcnet.data.dataset import Origin
from dcnet.data.folder_dataset import Files, Images
from dcnet.data.image_folder import labels_of, people_folders, scan

CLASSES = ("ant", "bee", "cat")
PER_CLASS = 4


def write_images(root: Path, per_class: int = PER_CLASS, part: str = "train") -> None:
    """Images of one color each, so that any crop identifies them."""
    for label, name in enumerate(CLASSES):
        folder = root / part / name
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(per_class):
            color = (label * 50, number * 10, 200 if part == "train" else 100)
            Image.new("RGB", (9, 7), color).save(folder / f"{number}.png")


@pytest.fixture
def colored(tmp_path: Path) -> FolderDataset:
    write_images(tmp_path)
    write_images(tmp_path, 3, "val")
    found = load_dataset("imagefolder", tmp_path)
    assert isinstance(found, FolderDataset)
    return found


@pytest.fixture
def noisy(tmp_path: Path) -> FolderDataset:
    """Six large images of noise, in which every crop looks different."""
    for part in ("train", "val"):
        (tmp_path / part / "noise").mkdir(parents=True)
        for number in range(6):
            Image.fromarray(pixels(40, 50, 3)).save(tmp_path / part / "noise" / f"{number}.png")
    return load_dataset("imagefolder", tmp_path)


def identities(images: torch.Tensor) -> list[tuple[int, ...]]:
    """The color of each single-color image."""
    colors = (images * 255).round().int()
    assert torch.equal(colors, colors[:, :, :1, :1].expand_as(colors))
    return [tuple(color) for color in colors[:, :, 0, 0].tolist()]


def take(found: FolderDataset, steps: int, **options: object) -> list[tuple[torch.Tensor, torch.Tensor]]:
    given = {"batch_size": 4, "size": 14, "seed": 0, "workers": 0, "steps": steps, **options}
    return list(found.train_loader(**given))


def test_contents_of_a_folder(colored: FolderDataset):
    assert colored.name == "imagefolder"
    assert colored.classes == CLASSES
    assert (colored.channels, colored.num_classes, colored.image_size) == (3, 3, 224)
    assert (len(colored.train), len(colored.val)) == (12, 9)
    assert colored.train.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert colored.val.path(8) == colored.val.root / "cat" / "2.png"
    assert colored.steps_per_epoch(5) == 2


@pytest.mark.parametrize("below", ["", "imagenet", "imagefolder"])
@pytest.mark.parametrize("part", ["val", "test"])
def test_layouts(below: str, part: str, tmp_path: Path):
    write_images(tmp_path / below)
    write_images(tmp_path / below, 2, part)
    (tmp_path / below / "train" / "ant" / "notes.txt").write_text("no image")
    (tmp_path / below / "train" / "ant" / "Ä.JPEG").write_bytes(
        (tmp_path / below / "train" / "ant" / "0.png").read_bytes()
    )
    (tmp_path / below / "train" / ".hidden").mkdir()
    (tmp_path / below / "train" / "ant" / "._0.png").write_bytes(b"what macOS notes of 0.png")
    found = load_dataset("imagefolder", tmp_path)
    assert (len(found.train), len(found.val)) == (13, 6)
    assert "Ä.JPEG" in {found.train.path(index).name for index in range(13)}
    assert all(found.train.path(index).is_file() for index in range(13))


def test_test_labels_match_training_labels(tmp_path: Path):
    write_images(tmp_path)
    (tmp_path / "val" / "cat").mkdir(parents=True)
    Image.new("RGB", (5, 5)).save(tmp_path / "val" / "cat" / "0.png")
    assert load_dataset("imagefolder", tmp_path).val.labels.tolist() == [2]


def test_images_match_labels(colored: FolderDataset):
    for images, labels in take(colored, 6):
        assert (images.shape, images.dtype, labels.dtype) == ((4, 3, 14, 14), torch.float32, torch.int64)
        assert [red // 50 for red, _, _ in identities(images)] == labels.tolist()


def test_every_image_is_seen_once_in_an_epoch_and_epochs_differ(colored: FolderDataset):
    seen = [identity for images, _ in take(colored, 6) for identity in identities(images)]
    assert len(set(seen[:12])) == len(set(seen[12:])) == 12
    assert seen[:12] != seen[12:]


def test_the_train_loader_is_endless(colored: FolderDataset):
    batches = iter(colored.train_loader(4, size=7, workers=0))
    assert len([next(batches) for _ in range(20)]) == 20


def test_steps_do_not_depend_on_the_start(noisy: FolderDataset):
    straight = take(noisy, 7, batch_size=2)
    later = take(noisy, 4, batch_size=2, start_step=3)
    for (images, labels), (expected, expected_labels) in zip(later, straight[3:], strict=True):
        assert torch.equal(images, expected)
        assert torch.equal(labels, expected_labels)
    other = take(noisy, 7, batch_size=2, seed=1)
    assert not any(torch.equal(one[0], two[0]) for one, two in zip(straight, other, strict=True))


def test_steps_before_the_start_are_not_decoded(noisy: FolderDataset, monkeypatch: pytest.MonkeyPatch):
    read, real = [], decode.read_rgb
    monkeypatch.setattr(folder_dataset, "read_rgb", lambda path: (read.append(path), real(path))[1])
    take(noisy, 1, batch_size=2, start_step=1000)
    assert len(read) == 2


def test_processes_split_the_global_batch(noisy: FolderDataset):
    alone = take(noisy, 5, batch_size=2)
    parts = [take(noisy, 5, batch_size=2, rank=rank, world=2) for rank in range(2)]
    for step, (images, _) in enumerate(alone):
        assert torch.equal(torch.cat([part[step][0] for part in parts]), images)


def test_workers_give_the_same_and_do_not_use_the_global_generator(noisy: FolderDataset):
    before = torch.get_rng_state()
    expected, found = take(noisy, 5, batch_size=2), take(noisy, 5, batch_size=2, workers=2)
    assert all(torch.equal(one[0], two[0]) for one, two in zip(expected, found, strict=True))
    assert torch.equal(torch.get_rng_state(), before)


def resized(found: FolderDataset, index: int, side: int) -> np.ndarray:
    """The pixels [side, side, 3] of a training file, resized by PIL."""
    with Image.open(found.train.path(index)) as image:
        return np.asarray(image.resize((side, side), Image.Resampling.BILINEAR))


def test_training_uses_every_crop_and_both_directions(noisy: FolderDataset):
    images = Images(noisy.train, size=21, seed=4)
    assert images.resized == 24
    places = Counter()
    for epoch in range(200):
        (found,), _ = images.__getitems__([(epoch, 3)])
        whole = resized(noisy, 3, 24)
        options = {
            (top, left, flip): whole[top : top + 21, left : left + 21][:, :: -1 if flip else 1]
            for top in range(4)
            for left in range(4)
            for flip in (False, True)
        }
        places.update(key for key, option in options.items() if np.array_equal(found.permute(1, 2, 0).numpy(), option))
    assert sum(places.values()) == 200
    assert len(places) == 32
    assert 70 < sum(count for (_, _, flip), count in places.items() if flip) < 130


def test_crops_do_not_depend_on_flips(noisy: FolderDataset):
    (either, _), *_ = take(noisy, 1, batch_size=6)
    (kept, _), *_ = take(noisy, 1, batch_size=6, flip=False)
    same = [torch.equal(one, two) for one, two in zip(either, kept, strict=True)]
    mirrored = [torch.equal(one, two.flip(-1)) for one, two in zip(either, kept, strict=True)]
    assert [not flipped for flipped in mirrored] == same
    assert 0 < sum(same) < 6


def test_crops_depend_on_seed_epoch_and_image(noisy: FolderDataset):
    keys = [(epoch, index) for epoch in range(4) for index in range(6)]
    places = {seed: [Images(noisy.train, 224, seed)._place(*key) for key in keys] for seed in (0, 1)}
    assert len(set(places[0] + places[1])) > 40


def test_the_sizes_of_the_paper(noisy: FolderDataset):
    assert Images(noisy.train, 224, 0).resized == 256


def test_the_test_uses_the_center_crop(noisy: FolderDataset):
    loader = noisy.test_loader(4, size=14, workers=0)
    assert len(loader) == 2
    first, second = loader
    assert (first[0].shape, second[0].shape) == ((4, 3, 14, 14), (2, 3, 14, 14))
    with Image.open(noisy.val.path(5)) as image:
        whole = np.asarray(image.resize((16, 16), Image.Resampling.BILINEAR))
    expected = torch.from_numpy(whole[1:15, 1:15].copy()).permute(2, 0, 1).float() / 255
    assert torch.equal(second[0][1], expected)
    # A loader can be iterated again, as after every epoch.
    assert torch.equal(next(iter(loader))[0], first[0])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_processes_split_the_test_images(world: int, colored: FolderDataset):
    loaders = [colored.test_loader(4, size=7, rank=rank, world=world, workers=0) for rank in range(world)]
    seen = [identity for loader in loaders for images, _ in loader for identity in identities(images)]
    assert len(seen) == len(set(seen)) == 9


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1"])
def test_images_of_any_mode_become_rgb(mode: str, tmp_path: Path):
    suffix = "tif" if mode == "CMYK" else "png"
    Image.new("RGB", (6, 6), (255, 255, 255)).convert(mode).save(tmp_path / f"image.{suffix}")
    found = decode.read_rgb(tmp_path / f"image.{suffix}")
    assert (found.mode, found.size, found.getpixel((1, 1))) == ("RGB", (6, 6), (255, 255, 255))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("content", [b"", b"no image", "torn"])
def test_error_for_a_damaged_image(workers: int, content: bytes | str, colored: FolderDataset):
    path = colored.val.path(4)
    path.write_bytes(path.read_bytes()[:45] if content == "torn" else content)
    message = sentence_of(lambda: list(colored.test_loader(4, size=7, workers=workers)))
    assert message.startswith(f"{path} cannot be read as an image: ")
    assert message.endswith("; replace or delete it")


def test_error_for_a_missing_image(colored: FolderDataset):
    colored.val.path(4).unlink()
    assert "bee/1.png cannot be read" in sentence_of(lambda: list(colored.test_loader(4, size=7, workers=0)))


def test_errors_for_folders(tmp_path: Path):
    load = lambda: load_dataset("imagefolder", tmp_path)  # noqa: E731
    other = "name another folder with --data-dir or DCNET_DATA"
    layouts = "train/<class>/*.jpg and val/<class>/*.jpg, or <class>/*.jpg,"
    assert sentence_of(load) == f"imagefolder is not in {tmp_path}: expected {layouts} there; {other}"
    write_images(tmp_path)
    expected = f"imagefolder is not in {tmp_path}: expected val/<class>/*.jpg or test/<class>/*.jpg there; {other}"
    assert sentence_of(load) == expected
    (tmp_path / "val").mkdir()
    rule = "must have a folder of images for each class of train, but"
    assert sentence_of(load) == f"{tmp_path / 'val'} {rule} it has no subfolders"
    (tmp_path / "val" / "dog").mkdir()
    assert sentence_of(load) == f"{tmp_path / 'val'} {rule} the class 'dog' is not in train"
    (tmp_path / "val" / "dog").rename(tmp_path / "val" / "cat")
    assert sentence_of(load).startswith(f"{tmp_path / 'val' / 'cat'} has no images: expected files that end with .jpg")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_size": 13}, "batch_size must be from 1 to 12, the number of images, not 13"),
        ({"world": 3}, "batch_size must be a multiple of the number of processes, 3, not 4"),
        ({"start_step": -1}, "start_step must be a whole number, 0 or more, not -1"),
        ({"size": 0}, "size must be a whole number, 1 or more, not 0"),
        ({"workers": -1}, "workers must be a whole number, 0 or more, not -1"),
    ],
)
def test_values_are_checked(values: dict[str, int], message: str, colored: FolderDataset):
    assert sentence_of(lambda: take(colored, 1, **values)) == message


def test_test_batches_must_divide_evenly(colored: FolderDataset):
    with pytest.raises(ValueError, match="batch_size must be a multiple of the number of processes, 3, not 4"):
        colored.test_loader(4, rank=0, world=3)


def test_16_bit_pixels_are_scaled(tmp_path: Path):
    ramp = np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8)
    Image.fromarray(ramp).save(tmp_path / "deep.png")
    found = np.asarray(decode.read_rgb(tmp_path / "deep.png"))
    assert found.shape == (8, 8, 3)
    np.testing.assert_array_equal(found[..., 0], ramp // 257)


def test_scan_is_linear_in_the_number_of_classes(tmp_path: Path):
    """A search per class takes 17 s for 20,000 classes."""

    class Listed(tuple):
        def index(self, *_: object) -> int:
            raise AssertionError("a search through all classes for each of them")

    write_images(tmp_path)
    assert scan(tmp_path / "train", Listed(CLASSES)).labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4


# --- folders without train and val ---


def write_unsplit(root: Path, counts: dict[str, int]) -> Path:
    for label, (name, count) in enumerate(counts.items()):
        (root / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (9, 7), (label * 50, number * 2, 0)).save(root / name / f"{number:03d}.png")
    return root


def names_of(files: Files) -> list[str]:
    return [str(files.path(index).relative_to(files.root)) for index in range(len(files))]


@pytest.mark.parametrize("below", ["", "imagefolder"])
def test_an_unsplit_folder_is_split_deterministically(below: str, tmp_path: Path):
    counts = {"ant": 20, "bee": 3, "cat": 1, "dog": 2}
    write_unsplit(tmp_path / below, counts)
    found, again = (load_dataset("imagefolder", tmp_path) for _ in range(2))
    assert found.classes == tuple(counts)
    assert torch.bincount(found.val.labels, minlength=4).tolist() == [4, 1, 0, 1]
    train, val = names_of(found.train), names_of(found.val)
    assert not set(train) & set(val)
    assert sorted(train + val) == sorted(f"{name}/{i:03d}.png" for name, n in counts.items() for i in range(n))
    assert [name.split("/")[0] for name in train] == [found.classes[label] for label in found.train.labels]
    # Not the first images, which may be similar.
    assert val[:4] != [f"ant/{i:03d}.png" for i in range(4)]
    assert (train, val) == (names_of(again.train), names_of(again.val))
    assert found.origin == again.origin
    assert found.held_out == 0.2


def test_errors_for_unsplit_folders(tmp_path: Path):
    load = lambda: load_dataset("imagefolder", tmp_path)  # noqa: E731
    write_unsplit(tmp_path, {"ant": 1, "bee": 1})
    assert sentence_of(load) == f"{tmp_path} has one image per class: expected more, some of them for the test"
    (tmp_path / "empty").mkdir()
    assert sentence_of(load).startswith(f"{tmp_path / 'empty'} has no images")
    # Half of the other layout.
    (tmp_path / "val").mkdir()
    assert sentence_of(load).startswith(f"imagefolder is not in {tmp_path}: expected train/<class>/*.jpg and val/")


# --- fingerprints ---


def fingerprint(folder: Path) -> str:
    return load_dataset("imagefolder", folder).origin.fingerprint


def test_fingerprint_depends_on_files_not_on_location(colored: FolderDataset, tmp_path: Path):
    before = fingerprint(tmp_path)
    moved = shutil.copytree(tmp_path / "train", tmp_path / "elsewhere" / "train").parent
    shutil.copytree(tmp_path / "val", moved / "val")
    assert fingerprint(moved) == before
    assert load_dataset("imagefolder", moved).origin.folder == moved
    changes = {
        "another size": lambda: (moved / "val" / "bee" / "1.png").write_bytes(b"longer than it was" * 100),
        "another name": lambda: (moved / "val" / "bee" / "1.png").rename(moved / "val" / "bee" / "x.png"),
        "one fewer": lambda: (moved / "train" / "cat" / "0.png").unlink(),
        "another class": lambda: [(moved / part / "ant").rename(moved / part / "ape") for part in ("train", "val")],
    }
    seen = {before}
    for change in changes.values():
        change()
        seen.add(fingerprint(moved))
    assert len(seen) == 1 + len(changes)


def test_built_in_datasets_have_no_fingerprint():
    assert load_dataset("digits").origin == Origin("digits")
    # A modified copy has no origin.
    assert dataclasses.replace(load_dataset("digits"), name="mine").origin is None


# --- damaged images ---


def test_unreadable_images_are_listed_and_can_be_left_out(colored: FolderDataset):
    bad = {"train/ant/1.png": b"", "train/cat/3.png": b"no image", "val/bee/0.png": None}
    for name, content in bad.items():
        path = colored.folder / name
        path.write_bytes(path.read_bytes()[:45] if content is None else content)
    found = colored.unreadable_images()
    assert list(found) == list(bad)
    assert all("cannot be read as an image" in reason for reason in found.values())
    left = colored.without(list(found))
    assert (len(left.train), len(left.val), left.skipped) == (10, 8, tuple(bad))
    assert not left.unreadable_images()
    assert left.train.labels.tolist() == [0] * 3 + [1] * 4 + [2] * 3
    # They still count for the fingerprint of the folder.
    assert left.origin is colored.origin
    everything = [str(path.relative_to(colored.folder)) for path in (colored.folder / "val").glob("*/*.png")]
    assert "has no readable images for test" in sentence_of(lambda: colored.without(everything))


def test_people_folders(tmp_path):
    for name in ("ann/2.png", "ann/1.jpg", "ben/x.webp", ".hidden/1.png"):
        write_image(tmp_path / name, 1)
    (tmp_path / "ann" / "notes.txt").write_text("")
    (tmp_path / "ann" / "._2.png").write_text("")
    (tmp_path / "empty").mkdir()
    assert people_folders(tmp_path) == {"ann": ("ann/1.jpg", "ann/2.png"), "ben": ("ben/x.webp",)}
    with pytest.raises(ValueError, match="has no images: expected a folder of images for each person"):
        people_folders(tmp_path / "ann")
    with pytest.raises(ValueError, match="there is no folder"):
        people_folders(tmp_path / "nobody")


def test_labels_of_numbers_people_in_order():
    labels, numbers = labels_of(["b/1.jpg", "a/1.jpg", "x/b/2.jpg"])
    assert (labels.tolist(), numbers) == ([0, 1, 0], {"b": 0, "a": 1})
    labels, more = labels_of(["a/2.jpg", "c/1.jpg"], numbers)
    assert (labels.tolist(), more) == ([1, 2], {"b": 0, "a": 1, "c": 2})
    assert numbers == {"b": 0, "a": 1}
