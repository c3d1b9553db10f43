"""idx files: folders, contents and errors."""

import gzip
import hashlib
from pathlib import Path

import numpy as np
import pytest
from helpers.data_files import idx, mnist_arrays, pixels, sentence_of, write_mnist

from dcnet.data import Dataset, load_dataset, mnist

URLS = {"mnist": mnist.MNIST.url, "fashion-mnist": mnist.FASHION_MNIST.url}


def assert_holds(found: Dataset, arrays: dict[str, np.ndarray]) -> None:
    for split, part in ((found.train, "train"), (found.test, "t10k")):
        assert split.images.shape[1:] == (1, 28, 28)
        assert np.array_equal(split.images[:, 0].numpy(), arrays[f"{part}-images-idx3-ubyte"])
        assert split.labels.tolist() == arrays[f"{part}-labels-idx1-ubyte"].tolist()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("name", "folder"),
    [
        *(("mnist", folder) for folder in (".", "MNIST/raw", "MNIST", "mnist", "mnist/raw")),
        *(("fashion-mnist", folder) for folder in (".", "FashionMNIST/raw", "fashion-mnist", "fashion")),
    ],
)
def test_files_are_found_in_the_usual_folders(name: str, folder: str, packed: bool, tmp_path: Path):
    arrays = mnist_arrays()
    write_mnist(tmp_path / folder, arrays, packed)
    found = load_dataset(name, tmp_path, download=False)
    assert_holds(found, arrays)
    assert (found.name, found.channels, found.image_size, found.num_classes) == (name, 1, 28, 10)


def test_class_names():
    assert mnist.MNIST.classes == tuple("0123456789")
    assert mnist.FASHION_MNIST.classes[0] == "T-shirt/top"
    assert mnist.FASHION_MNIST.classes[9] == "Ankle boot"


def test_mnist_and_fashion_mnist_side_by_side(tmp_path: Path):
    digits, clothes = mnist_arrays(), mnist_arrays()
    write_mnist(tmp_path / "MNIST" / "raw", digits)
    write_mnist(tmp_path / "FashionMNIST" / "raw", clothes, packed=True)
    assert_holds(load_dataset("mnist", tmp_path, download=False), digits)
    assert_holds(load_dataset("fashion-mnist", tmp_path, download=False), clothes)


def test_the_folder_of_a_dataset_comes_before_the_data_folder(tmp_path: Path):
    own, stray = mnist_arrays(), mnist_arrays()
    write_mnist(tmp_path / "mnist", own, packed=True)
    write_mnist(tmp_path, stray)
    assert_holds(load_dataset("mnist", tmp_path, download=False), own)


def test_plain_and_gzipped_files_can_be_mixed(tmp_path: Path):
    arrays = mnist_arrays()
    write_mnist(tmp_path, arrays)
    plain = tmp_path / "train-images-idx3-ubyte"
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    assert_holds(load_dataset("mnist", tmp_path, download=False), arrays)


def test_files_of_the_other_dataset_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    arrays = mnist_arrays()
    write_mnist(tmp_path, arrays)
    digest = hashlib.sha256(arrays["train-labels-idx1-ubyte"].tobytes()).hexdigest()
    monkeypatch.setitem(mnist.OWNERS, digest, "mnist")
    assert_holds(load_dataset("mnist", tmp_path, download=False), arrays)
    with pytest.raises(ValueError, match="expected labels of fashion-mnist, found those of mnist"):
        load_dataset("fashion-mnist", tmp_path, download=False)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_error_for_a_missing_file_says_where_to_get_it(name: str, tmp_path: Path):
    write_mnist(tmp_path, mnist_arrays())
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    message = sentence_of(lambda: load_dataset(name, tmp_path, download=False))
    assert message.startswith(f"{name} is not in {tmp_path}: expected train-images-idx3-ubyte, ")
    assert message.endswith(f"get it from {URLS[name]}, or name another folder with --data-dir or DCNET_DATA")


WHOLE = idx(pixels(12, 28, 28))
LABELS = idx(np.arange(12, dtype=np.uint8) % 10)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        (
            "train-images-idx3-ubyte",
            WHOLE[:-1],
            f"expected {16 + 9408} bytes for 12 entries, and at least one entry, found 9423",
        ),
        ("train-images-idx3-ubyte", WHOLE + b"x", "bytes for 12 entries, and at least one entry, found 9425"),
        ("train-images-idx3-ubyte", WHOLE[:9], "expected 16 bytes of sizes, found 9"),
        ("train-images-idx3-ubyte", b"", "expected the magic number 00000803, found nothing"),
        ("train-images-idx3-ubyte", LABELS, "expected the magic number 00000803, found 00000801"),
        ("train-images-idx3-ubyte", b"\0\0\x0d\x03" + WHOLE[4:], "expected the magic number 00000803, found 00000d03"),
        ("train-images-idx3-ubyte", idx(pixels(12, 27, 28)), "expected images of 28x28, found 27x28"),
        (
            "train-images-idx3-ubyte",
            idx(pixels(0, 28, 28)),
            "expected 16 bytes for 0 entries, and at least one entry, found 16",
        ),
        ("train-labels-idx1-ubyte", LABELS[:-1], "expected 20 bytes for 12 entries, and at least one entry, found 19"),
        (
            "train-labels-idx1-ubyte",
            idx(np.arange(11, dtype=np.uint8) % 10),
            "expected 12 labels, one for each image, found 11",
        ),
        ("t10k-labels-idx1-ubyte", idx(np.full(5, 10, np.uint8)), "expected labels from 0 to 9, found 10"),
        (
            "t10k-images-idx3-ubyte.gz",
            gzip.compress(WHOLE)[:-9],
            "gzipped if it ends with .gz, but Compressed file",
        ),
        ("t10k-images-idx3-ubyte.gz", WHOLE, "gzipped if it ends with .gz, but Not a gzipped file"),
        (
            "t10k-images-idx3-ubyte.gz",
            b"\x1f\x8b\x08" + b"\0" * 7 + b"\xff" * 9,
            "gzipped if it ends with .gz, but Error -3",
        ),
    ],
    # Not by content: compressed bytes contain the time, and all processes must use the same names of tests.
    ids=lambda value: f"{len(value)} bytes" if isinstance(value, bytes) else None,
)
def test_errors_for_files(name: str, content: bytes, problem: str, tmp_path: Path):
    write_mnist(tmp_path, mnist_arrays())
    (tmp_path / name.removesuffix(".gz")).unlink()
    (tmp_path / name).write_bytes(content)
    # Also with download=True: a file of the user is not replaced.
    message = sentence_of(lambda: load_dataset("mnist", tmp_path, download=True))
    assert message.startswith(f"{tmp_path / name} cannot be used: ")
    assert problem in message
    assert message.endswith(
        f"; replace it by the file from {URLS['mnist']}, or name another folder with --data-dir or DCNET_DATA"
    )


def test_error_for_a_corrupted_gzip_file(tmp_path: Path):
    write_mnist(tmp_path, mnist_arrays(), packed=True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="expected a complete file"):
        load_dataset("mnist", tmp_path, download=False)


def test_the_validation_digits_are_training_images():
    whole, held = load_dataset("digits"), load_dataset("digits-validation")
    assert (len(held.train), len(held.test)) == (450, 150)
    assert held.test.labels.bincount().tolist() == [15] * 10
    known = {image.numpy().tobytes() for image in whole.train.images}
    parts = [{image.numpy().tobytes() for image in part.images} for part in (held.train, held.test)]
    assert parts[0] | parts[1] == known
