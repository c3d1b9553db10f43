"""The training set of LFW: people, images and errors."""

from pathlib import Path

import numpy as np
import pytest
from helpers.data_files import sentence_of
from PIL import Image

from dcnet.data import load_dataset
from dcnet.data.lfw import find_lfw, trained_people

COUNTS = {"Ada_One": 6, "Bob_Two": 1, "Cy_Three": 2, "Di_Four": 5}
LISTED = "4\n" + "".join(f"{person}\t{count}\n" for person, count in COUNTS.items())


def shade(person: int, number: int) -> int:
    """The gray level of an image."""
    return 20 + 40 * person + 5 * number


def write_people(folder: Path, side: int = 96, suffix: str = ".png") -> Path:
    """Every image in one gray level; originals of LFW have a white frame."""
    for person, (name, count) in enumerate(COUNTS.items()):
        (folder / name).mkdir(parents=True)
        for number in range(1, count + 1):
            pixels = np.full((side, side, 3), shade(person, number), dtype=np.uint8)
            if side == 250:
                pixels[:61], pixels[-61:], pixels[:, :61], pixels[:, -61:] = 255, 255, 255, 255
            Image.fromarray(pixels).save(folder / name / f"{name}_{number:04d}{suffix}")
    (folder / "peopleDevTrain.txt").write_text(LISTED)
    return folder


@pytest.mark.parametrize("place", ["lfw-deepfunneled", "lfw_funneled", "lfw", ""])
@pytest.mark.parametrize("beside", [False, True])
def test_lfw_split(place: str, beside: bool, tmp_path: Path):
    root = write_people(tmp_path / "data" / place)
    if beside:
        (root / "peopleDevTrain.txt").rename(root.parent / "peopleDevTrain.txt")
    found = load_dataset("lfw", tmp_path / "data", download=False)
    assert found.classes == ("Ada_One", "Cy_Three", "Di_Four")
    assert (found.name, found.channels, found.image_size) == ("lfw", 3, 96)
    assert found.train.labels.tolist() == [0] * 5 + [1] * 2 + [2] * 4
    assert found.test.labels.tolist() == [0, 2]
    grays = [shade(0, number) for number in range(1, 6)] + [shade(2, 1), shade(2, 2)]
    grays += [shade(3, number) for number in range(1, 5)]
    assert found.train.images[:, 0, 0, 0].tolist() == grays
    assert found.test.images[:, 2, 95, 95].tolist() == [shade(0, 6), shade(3, 5)]


def test_original_files_are_center_cropped(tmp_path: Path):
    write_people(tmp_path / "lfw", side=250)
    images = load_dataset("lfw", tmp_path).test.images
    assert [image.unique().tolist() for image in images] == [[shade(0, 6)], [shade(3, 5)]]


def test_files_of_another_size_are_not_cropped(tmp_path: Path):
    write_people(tmp_path / "lfw", side=112)
    assert load_dataset("lfw", tmp_path).image_size == 96


def test_error_for_a_folder_without_faces_or_list(tmp_path: Path):
    (write_people(tmp_path / "without list" / "lfw") / "peopleDevTrain.txt").unlink()
    for folder in (tmp_path, tmp_path / "without list", tmp_path / "nothing"):
        message = sentence_of(lambda folder=folder: load_dataset("lfw", folder))
        assert message.startswith(
            f"lfw is not in {folder}: expected lfw-deepfunneled, lfw_funneled or lfw with Person/"
        )
        assert "and peopleDevTrain.txt in it or beside it; get it from http" in message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (LISTED.replace("Di_Four\t5", "Di_Four\t6"), "line 5: .* there is no .*Di_Four_0006"),
        ("1\nAda_One\t6\n", "too few people: expected two or more with 2 images each"),
        ("2\nAda_One\t2\nDi_Four\t4\n", "too few images: expected a person with 5 or more in peopleDevTrain"),
        ("", "line 1: '': expected the number of people"),
    ],
)
def test_errors_for_lists(text: str, says: str, tmp_path: Path):
    (write_people(tmp_path / "lfw") / "peopleDevTrain.txt").write_text(text)
    with pytest.raises(ValueError, match=says):
        load_dataset("lfw", tmp_path)


@pytest.mark.parametrize("broken", ["Ada_One/Ada_One_0001.png", "Di_Four/Di_Four_0004.png"])
def test_error_for_a_damaged_face(broken: str, tmp_path: Path):
    (write_people(tmp_path / "lfw") / broken).write_bytes(b"no image")
    assert sentence_of(lambda: load_dataset("lfw", tmp_path)).startswith(
        f"{tmp_path / 'lfw' / broken} cannot be read as an image"
    )


def test_trained_people_needs_no_images(tmp_path: Path):
    write_people(tmp_path / "lfw")
    assert {person: len(images) for person, images in trained_people(find_lfw(tmp_path)).items()} == {
        "Ada_One": 6,
        "Cy_Three": 2,
        "Di_Four": 5,
    }
