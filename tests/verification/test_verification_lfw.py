"""The layout of LFW and its lists, folders of people, lists of pairs, and the images in them."""

import numpy as np
import pytest
import torch
from lfw_folder import PAIRS, write_image, write_lfw
from PIL import Image

from dcnet.verification import ImageFiles, LfwData, Pairs, labels_of, people_disjoint, people_folders, read_pairs


@pytest.fixture
def folder(tmp_path):
    return write_lfw(tmp_path / "lfw")


def test_pairs_in_folds(folder):
    found = LfwData(folder).pairs()
    assert found.rows() == [
        ("Ada_One/Ada_One_0001.jpg", "Ada_One/Ada_One_0002.jpg", True),
        ("Bob_Two/Bob_Two_0001.jpg", "Cy_Three/Cy_Three_0001.jpg", False),
        ("Di_Four/Di_Four_0001.jpg", "Di_Four/Di_Four_0002.jpg", True),
        ("Ada_One/Ada_One_0003.jpg", "Di_Four/Di_Four_0002.jpg", False),
    ]
    assert found.folds.tolist() == [0, 0, 1, 1]
    assert len(found.names) == len(set(found.names)) == 7
    assert len(found) == 4


def test_pairs_without_folds_and_with_other_spaces(folder):
    found = LfwData(folder).pairs("pairsDevTest.txt")
    assert found.same.tolist() == [True, False]
    assert found.folds is None
    (folder / "pairs.txt").write_text(PAIRS.replace("\t", "  ").replace("\n", "\r\n") + "\n\n")
    assert LfwData(str(folder)).pairs("pairs").folds.tolist() == [0, 0, 1, 1]


def test_several_pairs_of_each_kind_in_a_fold(folder):
    same, other = "Ada_One 1 2\nAda_One 1 3\n", "Ada_One 1 Bob_Two 1\nAda_One 1 Bob_Two 2\n"
    (folder / "pairs.txt").write_text(f"2 2\n{same}{other}{same}{other}")
    found = LfwData(folder).pairs()
    assert found.same.tolist() == [True, True, False, False] * 2
    assert found.folds.tolist() == [0] * 4 + [1] * 4


def test_people(folder):
    data = LfwData(folder)
    ada = tuple(f"Ada_One/Ada_One_000{number}.jpg" for number in (1, 2, 3))
    assert data.people("peopleDevTrain") == {"Ada_One": ada, "Cy_Three": ("Cy_Three/Cy_Three_0001.jpg",)}
    assert {person: len(images) for person, images in data.everyone().items()} == {
        "Ada_One": 3,
        "Bob_Two": 2,
        "Cy_Three": 1,
        "Di_Four": 2,
    }


def test_lists_beside_the_folder_or_elsewhere(folder, tmp_path):
    (folder / "pairs.txt").rename(tmp_path / "pairs.txt")
    assert len(LfwData(folder).pairs()) == 4
    (tmp_path / "lists").mkdir()
    (tmp_path / "pairs.txt").rename(tmp_path / "lists" / "pairs.txt")
    assert len(LfwData(folder, tmp_path / "lists").pairs()) == 4
    with pytest.raises(ValueError, match=r"there is no list 'pairs.txt': expected it in .*lfw or "):
        LfwData(folder).pairs()
    with pytest.raises(ValueError, match="there is no folder"):
        LfwData(tmp_path / "nowhere")


def test_images_may_be_of_another_format(tmp_path):
    assert LfwData(write_lfw(tmp_path, ".png")).pairs().names[0] == "Ada_One/Ada_One_0001.png"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("Ada_One\t1\t2", "Ada_One\t1\t9", r"pairs.txt, line 2: 'Ada_One\\t1\\t9': .* there is no .*Ada_One_0009.jpg"),
        ("Bob_Two\t1\tC", "Eve\t1\tC", r"line 3: .* there is no .*Eve_0001.jpg"),
        ("Ada_One\t1\t2", "Ada_One\t1", r"line 2: 'Ada_One\\t1': expected a pair of one person: name<tab>number<tab>"),
        ("Ada_One\t1\t2", "Ada_One\tone\t2", "line 2: .* expected a pair of one person"),
        ("Ada_One\t1\t2", "Ada_One\t0\t2", "line 2: .* expected a pair of one person"),
        ("Ada_One\t1\t2", "Ada_One\t2\t2", "line 2: .* expected a pair of one person"),
        ("Ada_One\t1\t2", "Ada_One", "line 2: 'Ada_One': expected a pair of one person"),
        ("Ada_One\t1\t2", "Ada_One\t1\tDi_Four\t2", "line 2: .* expected a pair of one person"),
        ("Bob_Two\t1\tCy_Three\t1", "Bob_Two\t1\t2", "line 3: .* expected a pair of two people"),
        ("Bob_Two\t1\tCy_Three\t1", "Bob_Two\t1\tBob_Two\t2", "line 3: .* expected a pair of two people"),
        ("2\t1\n", "two\t1\n", r"line 1: 'two\\t1': expected folds and pairs, such as '10<tab>300', or"),
        ("2\t1\n", "2\t1\t1\n", "line 1: .* expected folds and pairs"),
        ("2\t1\n", "3\t1\n", r"has 4 pairs: expected 6, as its first line says, '3\\t1'"),
        ("2\t1\n", "1\n", "has 4 pairs: expected 2, as its first line says, '1'"),
        (PAIRS, "", "line 1: '': expected folds and pairs"),
    ],
)
def test_a_line_that_is_wrong_is_named(folder, old, new, says):
    (folder / "pairs.txt").write_text(PAIRS.replace(old, new))
    with pytest.raises(ValueError, match=says):
        LfwData(folder).pairs()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1\nAda_One\t4\n", "line 2: 'Ada_One\\\\t4': .* there is no .*Ada_One_0004.jpg"),
        ("1\nAda_One\n", "line 2: 'Ada_One': expected a person: name<tab>number of images"),
        ("1\nAda_One\tmany\n", "line 2: .* expected a person"),
        ("2\nAda_One\t3\n", "has 1 people: expected 2, as its first line says"),
        ("2\nAda_One\t3\nAda_One\t3\n", "line 3: .* each person once"),
        ("Ada_One\t3\n", "line 1: .* expected the number of people"),
        ("", "line 1: '': expected the number of people"),
    ],
)
def test_a_list_of_people_that_is_wrong_is_named(folder, text, says):
    (folder / "peopleDevTrain.txt").write_text(text)
    with pytest.raises(ValueError, match=says):
        LfwData(folder).people("peopleDevTrain")


def test_a_list_that_is_no_text(folder):
    (folder / "pairs.txt").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ValueError, match=r"pairs\.txt cannot be read as a list"):
        LfwData(folder).pairs()


def test_pairs_of_people_who_were_not_trained_on(folder):
    found = people_disjoint(LfwData(folder).pairs(), ["Cy_Three", "Somebody_Else"])
    assert [row[2] for row in found.pairs.rows()] == [True, True, False]
    assert found.pairs.folds.tolist() == [0, 1, 1]
    assert (found.same, found.different, found.left_out, found.people_left_out) == (2, 1, 1, 1)
    assert "Cy_Three/Cy_Three_0001.jpg" not in found.pairs.names
    assert "Bob_Two/Bob_Two_0001.jpg" not in found.pairs.names
    both = people_disjoint(LfwData(folder).pairs("pairsDevTest"), ["Cy_Three"])
    assert both.pairs.folds is None
    with pytest.raises(ValueError, match="no pair is left: all 4 pairs have a person who was trained on"):
        people_disjoint(LfwData(folder).pairs(), ["Ada_One", "Bob_Two", "Di_Four"])


def test_an_image_in_no_folder_has_no_person():
    with pytest.raises(ValueError, match=r"the image '1\.jpg' is in no folder, which would name its person"):
        people_disjoint(Pairs.of_names([("1.jpg", "a/2.jpg", True)]), [])


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
