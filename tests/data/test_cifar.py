"""CIFAR in all layouts, errors for wrong files, and the derived datasets."""

import gzip
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.data_files import (
    cifar_binary,
    cifar_files,
    cifar_python,
    pixels,
    python2_pickle,
    sentence_of,
    tar_gz,
    write_files,
)

from dcnet.data import Dataset, Split, cifar, download, load_dataset
from dcnet.data.cifar import CIFAR_100, cifar100_open, hold_out, split_classes

NAMES = ["cifar10", "cifar100"]
LAYOUTS = ["binary", "python"]
ARCHIVES = {
    ("cifar10", "binary"): "cifar-10-binary.tar.gz",
    ("cifar10", "python"): "cifar-10-python.tar.gz",
    ("cifar100", "binary"): "cifar-100-binary.tar.gz",
    ("cifar100", "python"): "cifar-100-python.tar.gz",
}


def assert_holds(found: Dataset, arrays: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    for split, names in ((found.train, list(arrays)[:-1]), (found.test, list(arrays)[-1:])):
        images = np.concatenate([arrays[name][0] for name in names]).reshape(-1, 3, 32, 32)
        assert np.array_equal(split.images.numpy(), images)
        assert split.labels.tolist() == [int(label) for name in names for label in arrays[name][1]]


def error_of(name: str, folder: Path) -> str:
    message = sentence_of(lambda: load_dataset(name, folder, download=False))
    assert f"from {cifar.URL}cifar-{name.removeprefix('cifar')}-" in message
    assert message.endswith(", or name another folder with --data-dir or DCNET_DATA")
    return message


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", ["", "itself", "own", "archive", "own archive"])
def test_every_layout_is_read(name: str, layout: str, place: str, tmp_path: Path):
    folder, contents, arrays = cifar_files(name, layout)
    if place.endswith("archive"):
        root = tmp_path / name if place.startswith("own") else tmp_path
        write_files(root, {ARCHIVES[name, layout]: tar_gz(folder, contents)})
    else:
        write_files({"": tmp_path / folder, "itself": tmp_path, "own": tmp_path / name / folder}[place], contents)
    found = load_dataset(name, tmp_path, download=False)
    assert_holds(found, arrays)
    assert (found.name, found.channels, found.image_size) == (name, 3, 32)


def test_class_names():
    ten, hundred = cifar.CIFAR_10.classes, cifar.CIFAR_100.classes
    assert (len(ten), ten[0], ten[9]) == (10, "airplane", "truck")
    assert (len(set(hundred)), hundred[0], hundred[19], hundred[99]) == (100, "apple", "cattle", "worm")
    assert list(hundred) == sorted(hundred)


def test_an_incomplete_folder_is_skipped(tmp_path: Path):
    folder, contents, _ = cifar_files("cifar10", "binary")
    del contents["data_batch_3.bin"]
    write_files(tmp_path / folder, contents)
    message = error_of("cifar10", tmp_path)
    assert message.startswith(
        f"cifar10 is not in {tmp_path}: expected cifar-10-batches-bin or cifar-10-binary.tar.gz or "
    )
    folder, contents, arrays = cifar_files("cifar10", "python")
    write_files(tmp_path, {ARCHIVES["cifar10", "python"]: tar_gz(folder, contents)})
    assert_holds(load_dataset("cifar10", tmp_path, download=False), arrays)


IMAGES = pixels(4, 3072)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("cifar10", b"", "expected one or more records of 3073 bytes, found 0 bytes"),
        ("cifar10", cifar_binary("cifar10", IMAGES, np.zeros(4))[:-1], "records of 3073 bytes, found 12291 bytes"),
        ("cifar10", cifar_binary("cifar10", IMAGES, np.array([0, 9, 10, 3])), "expected labels from 0 to 9, found 10"),
        ("cifar100", cifar_binary("cifar100", IMAGES, np.zeros(4))[:-1], "records of 3074 bytes, found 12295 bytes"),
        ("cifar100", cifar_binary("cifar10", IMAGES, np.zeros(4)), "records of 3074 bytes, found 12292 bytes"),
        ("cifar100", bytes([19, 100]) + bytes(3072), "expected labels from 0 to 99, found 100"),
        ("cifar100", bytes([20, 99]) + bytes(3072), "expected labels from 0 to 19, found 20"),
    ],
)
def test_errors_for_binary_files(name: str, content: bytes, problem: str, tmp_path: Path):
    folder, contents, _ = cifar_files(name, "binary")
    file = "data_batch_4.bin" if name == "cifar10" else "test.bin"
    write_files(tmp_path / folder, {**contents, file: content})
    message = error_of(name, tmp_path)
    assert message.startswith(f"{tmp_path / folder / file} cannot be used: ")
    assert problem in message


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (cifar_python("cifar10", IMAGES, np.array([0, 1, 2, 10])), "expected labels from 0 to 9, found 10"),
        (cifar_python("cifar10", IMAGES, np.array([0, 1, 2, -1])), "expected labels from 0 to 9, found -1"),
        (cifar_python("cifar10", IMAGES, np.zeros(3)), "expected 'labels' to be a whole number for each of 4 images"),
        (python2_pickle({"data": IMAGES, "labels": [0, 1, 2, "3"]}), "expected 'labels' to be a whole number for each"),
        (python2_pickle({"data": IMAGES, "labels": 3}), "expected 'labels' to be a whole number for each of 4 images"),
        (python2_pickle({"data": IMAGES}), "expected 'labels' to be a whole number for each of 4 images"),
        (
            python2_pickle({"data": pixels(0, 3072), "labels": []}),
            "expected 'labels' to be a whole number for each of 0",
        ),
        (python2_pickle({"labels": [1]}), "expected 'data' to be uint8 [N, 3072], found NoneType"),
        (python2_pickle({"data": IMAGES[:, 1:].copy(), "labels": [1] * 4}), "[N, 3072], found uint8 [4, 3071]"),
        (python2_pickle({"data": IMAGES.astype(np.int64), "labels": [1] * 4}), "[N, 3072], found int64 [4, 3072]"),
        (python2_pickle([1]), "expected a pickled dictionary of arrays and plain values, but it is a list"),
        (
            cifar_python("cifar10", IMAGES, np.zeros(4))[:5000],
            "expected a pickled dictionary of arrays and plain values",
        ),
    ],
)
def test_errors_for_pickle_files(content: bytes, problem: str, tmp_path: Path):
    folder, contents, _ = cifar_files("cifar10", "python")
    write_files(tmp_path / folder, {**contents, "data_batch_2": content})
    message = error_of("cifar10", tmp_path)
    assert message.startswith(f"{tmp_path / folder / 'data_batch_2'} cannot be used: ")
    assert problem in message


def test_cifar100_uses_fine_labels(tmp_path: Path):
    folder, contents, _ = cifar_files("cifar100", "python")
    content = python2_pickle({"data": IMAGES, "fine_labels": [99, 98, 0, 1], "coarse_labels": [0, 0, 0, 0]})
    write_files(tmp_path / folder, {**contents, "test": content})
    assert load_dataset("cifar100", tmp_path, download=False).test.labels.tolist() == [99, 98, 0, 1]


def packed(**changes: bytes) -> bytes:
    folder, contents, _ = cifar_files("cifar100", "binary")
    return tar_gz(folder, {**contents, **changes})


def flipped(content: bytes) -> bytes:
    changed = bytearray(content)
    changed[len(changed) // 2] ^= 1
    return bytes(changed)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (packed()[:-100], "expected a complete .tar.gz"),
        (packed()[: len(packed()) // 2], "expected a complete .tar.gz"),
        (flipped(packed()), "expected a complete .tar.gz"),
        (packed()[:-8] + b"\0\0\0\0" + packed()[-4:], "expected a complete .tar.gz, but CRC check failed"),
        (b"no archive", "expected a complete .tar.gz, but Not a gzipped file"),
        (gzip.compress(b"no archive"), "expected a complete .tar.gz"),
        (
            gzip.compress(gzip.decompress(packed())[:5000]),
            ".tar.gz, but unexpected end of data",
        ),
        (
            tar_gz("cifar-100-binary", {"train.bin": b"x"}),
            "expected cifar-100-binary/test.bin in it, found no such file",
        ),
        (
            tar_gz("/cifar-100-binary", cifar_files("cifar100", "binary")[1]),
            "expected cifar-100-binary/train.bin in it",
        ),
        (
            tar_gz("../cifar-100-binary", cifar_files("cifar100", "binary")[1]),
            "expected cifar-100-binary/train.bin in it",
        ),
    ],
    # Not by content: compressed bytes contain the time, and all processes must use the same names of tests.
    ids=range(10),
)
def test_errors_for_archives(content: bytes, problem: str, tmp_path: Path):
    path = tmp_path / "cifar-100-binary.tar.gz"
    path.write_bytes(content)
    message = error_of("cifar100", tmp_path)
    assert message.startswith(f"{path} cannot be used: ")
    assert problem in message


def test_too_large_files_of_an_archive_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "cifar-100-binary.tar.gz").write_bytes(packed())
    monkeypatch.setattr(download, "MAX_FILE", 4 * 3074)
    assert len(load_dataset("cifar100", tmp_path, download=False).train) == 4
    monkeypatch.setattr(download, "MAX_FILE", 4 * 3074 - 1)
    assert "expected cifar-100-binary/train.bin in it" in error_of("cifar100", tmp_path)


def test_archives_write_nothing_and_links_are_not_followed(tmp_path: Path):
    folder, contents, arrays = cifar_files("cifar100", "binary")
    data, secret = tmp_path / "data", tmp_path / "secret"
    data.mkdir()
    secret.write_bytes(contents["train.bin"])
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as made:
        evil = tarfile.TarInfo("../escaped")
        evil.size = 4
        made.addfile(evil, io.BytesIO(b"evil"))
        for name in ("train.bin", "test.bin"):
            link = tarfile.TarInfo(f"{folder}/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, str(secret)
            made.addfile(link)
    (data / "cifar-100-binary.tar.gz").write_bytes(stream.getvalue())
    assert "expected cifar-100-binary/train.bin in it" in error_of("cifar100", data)
    (data / "cifar-100-binary.tar.gz").write_bytes(tar_gz(f"./{folder}", contents))
    assert_holds(load_dataset("cifar100", data, download=False), arrays)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["cifar-100-binary.tar.gz", "data", "secret"]


# --- CIFAR-100 as an open set ---


UNSEEN = (
    "camel can flatfish forest house kangaroo keyboard lawn_mower mushroom otter pickup_truck road squirrel "
    "sunflower sweet_pepper tank tulip turtle whale wolf"
)


def write_hundred(folder: Path) -> None:
    """Two training images and one test image per class."""
    files = {"train.bin": np.arange(200) % 100, "test.bin": np.arange(100)}
    contents = {name: cifar_binary("cifar100", pixels(len(labels), 3072), labels) for name, labels in files.items()}
    write_files(folder / "cifar-100-binary", contents)


def test_open_set_classes_are_fixed(tmp_path: Path):
    write_hundred(tmp_path)
    found, parts = load_dataset("cifar100-open", tmp_path, download=False), cifar100_open(tmp_path, download=False)
    assert (found.name, found.num_classes, found.image_size) == ("cifar100-open", 80, 32)
    assert (len(found.train), len(found.test), len(parts.unseen)) == (160, 80, 60)
    assert torch.equal(found.train.images, parts.known.train.images)
    assert sorted((*found.classes, *parts.unseen_classes)) == sorted(CIFAR_100.classes)
    assert " ".join(parts.unseen_classes) == UNSEEN


def test_error_for_a_folder_without_cifar(tmp_path: Path):
    message = sentence_of(lambda: load_dataset("cifar100-open", tmp_path, download=False))
    assert message.startswith(f"cifar100 is not in {tmp_path}: expected cifar-100-binary")


# --- held-out training images ---


def test_hold_out_is_balanced_and_disjoint():
    labels = torch.arange(60) % 3
    split = Split(torch.arange(60, dtype=torch.uint8).view(60, 1, 1, 1).expand(60, 1, 2, 2).contiguous(), labels)
    train, held = hold_out(split, 3, 4)
    assert torch.bincount(held.labels).tolist() == [4, 4, 4]
    numbers = [part.images[:, 0, 0, 0].tolist() for part in (train, held)]
    assert sorted(numbers[0] + numbers[1]) == list(range(60))
    assert all(part == sorted(part) for part in numbers)
    for part, own in zip((train, held), numbers, strict=True):
        assert part.labels.tolist() == [number % 3 for number in own]
    assert torch.equal(held.images, hold_out(split, 3, 4)[1].images)
    # Random images, not the first or last of each class.
    assert numbers[1] != list(range(12))


def lettered(classes: int = 7, images: int = 60) -> Dataset:
    """The first pixel of an image is its class, the second its number."""

    def split(start: int) -> Split:
        labels = torch.arange(images) * 5 % classes
        pixels = torch.zeros(images, 1, 2, 2, dtype=torch.uint8)
        pixels[:, 0, 0, 0], pixels[:, 0, 0, 1] = labels, torch.arange(start, start + images)
        return Split(pixels, labels)

    return Dataset("letters", split(0), split(images), tuple("abcdefghijklm"[:classes]))


def true_classes(split: Split) -> list[int]:
    return split.images[:, 0, 0, 0].tolist()


def test_split_classes_names_known_and_unseen_classes():
    whole = lettered()
    found = split_classes(whole, 3)
    assert len(found.known.classes) == 4
    assert len(found.unseen_classes) == 3
    assert {*found.known.classes, *found.unseen_classes} == set("abcdefg")
    assert list(found.known.classes) == sorted(found.known.classes)
    assert found.known.name == "letters-4-of-7-seed0"
    for split, names in (
        (found.known.train, found.known.classes),
        (found.known.test, found.known.classes),
        (found.unseen, found.unseen_classes),
    ):
        named = [names[label] for label in split.labels.tolist()]
        assert named == ["abcdefg"[true] for true in true_classes(split)]
        assert set(named) == set(names)


def test_split_classes_keeps_all_images_in_order():
    whole = lettered()
    found = split_classes(whole, 3)
    numbers = {
        name: split.images[:, 0, 0, 1].tolist()
        for name, split in (("train", found.known.train), ("test", found.known.test), ("unseen", found.unseen))
    }
    assert all(part == sorted(part) for part in numbers.values())
    assert max(numbers["train"]) < 60 <= min(numbers["test"])
    assert sorted(number for part in numbers.values() for number in part) == list(range(120))


def test_split_classes_depends_on_the_seed():
    whole = lettered(13)
    chosen = [split_classes(whole, 5, seed).unseen_classes for seed in range(8)]
    assert chosen == [split_classes(whole, 5, seed).unseen_classes for seed in range(8)]
    assert len(set(chosen)) > 4


@pytest.mark.parametrize("unseen", [0, 6, 7])
def test_split_classes_rejects_invalid_counts(unseen):
    with pytest.raises(ValueError, match=f"from 1 to 5, so that two of 7 classes are left, not {unseen}"):
        split_classes(lettered(), unseen)
