"""Folders of people, lists of paths, and the images in them."""

import numpy as np
import pytest
import torch
from lfw_folder import write_image
from PIL import Image

from dcnet.verification import ImageFiles, labels_of, people_folders, read_pairs


@pytest.mark.parametrize(
    "text", ["a/1.png,b/1.png,0\na/1.png,a/2.png,1\n", "a/1.png  b/1.png different\n#\n\na/1.png\ta/2.png\tSame"]
)
def test_a_list_of_paths(tmp_path, text):
    for name in ("a/1.png", "a/2.png", "b/1.png"):
        write_image(tmp_path / name, 1)
    (tmp_path / "list.txt").write_text(text)
    found = read_pairs(tmp_path / "list.txt")
    assert found.rows() == [("a/1.png", "b/1.png", False), ("a/1.png", "a/2.png", True)]
    assert found.names == ("a/1.png", "b/1.png", "a/2.png")
    assert found.first.tolist() == [0, 0]
    assert found.second.tolist() == [1, 2]
    (tmp_path / "lists").mkdir()
    (tmp_path / "list.txt").rename(tmp_path / "lists" / "list.txt")
    assert read_pairs(tmp_path / "lists" / "list.txt", tmp_path).rows() == found.rows()


def test_paths_with_spaces_need_commas_or_tabs(tmp_path):
    write_image(tmp_path / "a b/1 2.png", 1)
    write_image(tmp_path / "c.png", 2)
    (tmp_path / "list.csv").write_text("a b/1 2.png, c.png, 0\na b/1 2.png\tc.png\t0\n")
    assert read_pairs(tmp_path / "list.csv").rows() == [("a b/1 2.png", "c.png", False)] * 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a.png a.png 1\na.png b.png 0\n", r"list.txt, line 2: 'a.png b.png 0': .* there is no .*b.png"),
        ("\na.png a.png 2\n", "line 2: 'a.png a.png 2': expected two paths and one of 0, 1, same, different"),
        ("a.png 1\n", "line 1: 'a.png 1': expected two paths"),
        ("a.png a.png a.png 1\n", "line 1: .* expected two paths"),
        ("# nothing\n", "has no pairs: expected lines such as 'a/1.jpg,b/1.jpg,0'"),
    ],
)
def test_a_list_of_paths_that_is_wrong_is_named(tmp_path, text, says):
    write_image(tmp_path / "a.png", 1)
    (tmp_path / "list.txt").write_text(text)
    with pytest.raises(ValueError, match=says):
        read_pairs(tmp_path / "list.txt")


def test_folders_of_people(tmp_path):
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


def test_people_are_numbers_in_the_order_in_which_they_come():
    labels, numbers = labels_of(["b/1.jpg", "a/1.jpg", "x/b/2.jpg"])
    assert (labels.tolist(), numbers) == ([0, 1, 0], {"b": 0, "a": 1})
    labels, more = labels_of(["a/2.jpg", "c/1.jpg"], numbers)
    assert (labels.tolist(), more) == ([1, 2], {"b": 0, "a": 1, "c": 2})
    assert numbers == {"b": 0, "a": 1}


def test_images_are_read_when_they_are_wanted(tmp_path):
    write_image(tmp_path / "a/1.png", 1)
    files = ImageFiles(tmp_path, ("a/1.png", "a/2.png"), 12)
    expected = torch.from_numpy(np.array(Image.open(tmp_path / "a/1.png"))).permute(2, 0, 1)
    assert torch.equal(files[0], expected)
    write_image(tmp_path / "a/2.png", 2)
    (batch,) = files.batches()
    assert batch.shape == (2, 3, 12, 12)
    assert batch.dtype == torch.uint8
    assert [len(part) for part in files.batches(1)] == [1, 1]
    assert len(files) == 2


def test_the_square_around_the_centre(tmp_path):
    write_image(tmp_path / "a.png", 1, width=13, height=10)
    whole = np.array(Image.open(tmp_path / "a.png"))
    found = ImageFiles(tmp_path, ("a.png",), size=4, crop=4)[0]
    assert np.array_equal(found.permute(1, 2, 0).numpy(), whole[3:7, 4:8])
    resized = ImageFiles(tmp_path, ("a.png",), size=2, crop=4)[0]
    expected = Image.fromarray(whole[3:7, 4:8]).resize((2, 2), Image.Resampling.BILINEAR)
    assert np.array_equal(resized.permute(1, 2, 0).numpy(), np.array(expected))


def test_what_was_cropped_is_not_cropped_again(tmp_path):
    write_image(tmp_path / "a.png", 1, width=13, height=10)
    with pytest.raises(ValueError, match=r"a.png has 13 x 10 pixels, and no 11 x 11 around its centre"):
        ImageFiles(tmp_path, ("a.png",), size=4, crop=11)[0]


def test_grey_images_get_three_channels_and_broken_ones_a_sentence(tmp_path):
    Image.new("L", (4, 4), 7).save(tmp_path / "grey.png")
    (tmp_path / "broken.png").write_bytes(b"nothing")
    files = ImageFiles(tmp_path, ("grey.png", "broken.png", "missing.png"), 4)
    assert torch.equal(files[0], torch.full((3, 4, 4), 7, dtype=torch.uint8))
    for at in (1, 2):
        with pytest.raises(ValueError, match=f"{files.names[at]} cannot be read as an image"):
            files[at]


@pytest.mark.parametrize("options", [{"size": 0}, {"size": 4, "crop": 0}])
def test_sides_that_are_none_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match="must be at least 1, not 0"):
        ImageFiles(tmp_path, (), **options)
