"""Datasets by name, their folders, and the digits."""

from pathlib import Path

import numpy as np
import pooch
import pytest
import torch
from helpers.data_files import mnist_arrays, write_mnist
from sklearn.datasets import load_digits

from dcnet.data import Dataset, Entry, Split, datasets, load_dataset, register
from dcnet.data.load import data_folder
from dcnet.training import recipe
from dcnet.training.identity import with_data


def test_every_dataset_has_a_description():
    small, large = {"digits", "digits-validation", "mnist", "fashion-mnist", "cifar10", "cifar100"}, {"imagefolder"}
    assert set(datasets) == small | large | {"cifar100-open", "cifar100-validation", "cifar10-validation", "lfw"}
    for entry in datasets.values():
        assert 20 < len(entry.about) < 110
        assert "\n" not in entry.about


def test_every_download_has_a_checksum():
    # Two datasets may share a file.
    files = {file for entry in datasets.values() for file in entry.files}
    assert len(files) == 4 + 4 + 1 + 1
    for file in files:
        assert file.checksum.startswith("sha256:")
        assert len(bytes.fromhex(file.checksum.removeprefix("sha256:"))) == 32
        assert file.url.endswith((".gz", ".tar.gz"))
    assert len({file.checksum for file in files}) == len(files)


def test_error_for_an_unknown_name():
    with pytest.raises(ValueError, match=r"unknown dataset 'cifar': known are .*digits.*; did you mean 'cifar10'\?"):
        load_dataset("cifar")
    # Damaged records may contain such a value.
    with pytest.raises(ValueError, match="unknown dataset None: known are"):
        load_dataset(None)


def test_a_name_can_be_registered_once():
    with pytest.raises(ValueError, match="'digits' is taken"):
        register("digits", "again")(datasets["digits"].load)


def test_digits_match_scikit_learn():
    found = load_dataset("digits")
    assert isinstance(found, Dataset)
    assert (len(found.train), len(found.test)) == (600, 1197)
    assert (found.channels, found.image_size, found.classes) == (1, 8, tuple("0123456789"))
    pixels, labels = load_digits(return_X_y=True)
    expected = sorted((*np.round(row * 255 / 16).astype(int), label) for row, label in zip(pixels, labels, strict=True))
    rows = [
        (*image.flatten().tolist(), label.item())
        for split in (found.train, found.test)
        for image, label in zip(split.images, split.labels, strict=True)
    ]
    assert sorted(rows) == expected


def test_digits_are_stratified_and_always_the_same():
    found, again = load_dataset("digits"), load_dataset("digits")
    assert torch.equal(found.train.images, again.train.images)
    shares = torch.bincount(found.train.labels) / 600 - torch.bincount(found.test.labels) / 1197
    assert shares.abs().max() < 0.002
    # The first of scikit-learn's split with seed 0, by which `examples/digits.py` trains.
    assert found.train.labels[:6].tolist() == [9, 6, 9, 2, 6, 6]


def test_data_folder_is_the_argument_the_variable_or_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DCNET_DATA", str(tmp_path / "variable"))
    assert data_folder(tmp_path / "argument") == tmp_path / "argument"
    assert data_folder(str(tmp_path / "argument")) == tmp_path / "argument"
    assert data_folder() == tmp_path / "variable"
    monkeypatch.setenv("DCNET_DATA", "")
    assert data_folder() == Path(pooch.os_cache("dcnet"))
    monkeypatch.delenv("DCNET_DATA")
    assert data_folder() == Path(pooch.os_cache("dcnet"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_folder("~/data") == tmp_path / "data"


def test_files_are_found_in_dcnet_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_mnist(tmp_path / "mnist", mnist_arrays())
    monkeypatch.setenv("DCNET_DATA", str(tmp_path))
    assert len(load_dataset("mnist", download=False).train) == 12


def test_a_dataset_from_a_folder_is_identified_by_its_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def load(folder: Path, download: bool) -> Dataset:
        shade = int((folder / "shade.txt").read_text())
        split = Split(torch.full((4, 1, 2, 2), shade, dtype=torch.uint8), torch.arange(4) % 2)
        return Dataset("shades", split, split, ("a", "b"))

    monkeypatch.setitem(datasets, "shades", Entry(load, "images of one shade", from_folder=True))
    found = []
    for folder, shade in {"one": 7, "two": 8, "three": 7}.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "shade.txt").write_text(str(shade))
        found.append(load_dataset("shades", tmp_path / folder).origin)
    assert [origin.folder for origin in found] == [tmp_path / name for name in ("one", "two", "three")]
    assert found[0].fingerprint == found[2].fingerprint != found[1].fingerprint
    # The same in every run.
    config = recipe("digits", dataset="shades")
    hashes = {with_data(config, load_dataset("shades", tmp_path / name)).hash for name in ("one", "two", "three")}
    assert len(hashes) == 2
