"""The layout of LFW and its lists, and what is left of them without the people who were trained on."""

import pytest
import torch
from lfw_folder import PAIRS, write_lfw

from dcnet.verification import LfwData, Pairs, people_disjoint, sample_pairs


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


def test_pairs_without_names_cannot_be_told_apart_by_folders():
    with pytest.raises(ValueError, match="these 6 pairs have no names of files, as those of `read_pairs` have"):
        people_disjoint(sample_pairs(torch.arange(10) % 3, 6), ["Ada_One"])


def test_an_image_in_no_folder_shows_nobody_who_was_trained_on():
    pairs = Pairs.of_names([("1.jpg", "a/2.jpg", True), ("1.jpg", "b/2.jpg", False)])
    found = people_disjoint(pairs, ["a", ""])
    assert found.pairs.rows() == [("1.jpg", "b/2.jpg", False)]
    assert (found.left_out, found.people_left_out) == (1, 1)


def test_the_folder_of_lfw_or_one_that_it_is_in(folder, tmp_path):
    for data in (folder, tmp_path):
        assert LfwData.found_in(data, "pairs").root == folder
    (folder / "pairs.txt").rename(tmp_path / "pairs.txt")
    assert len(LfwData.found_in(tmp_path, "pairs").pairs("pairs")) == 4
    with pytest.raises(ValueError, match="there is no folder"):
        LfwData.found_in(tmp_path / "nowhere", "pairs")


def test_of_several_folders_of_lfw_the_one_with_the_list_is_taken(folder, tmp_path):
    (tmp_path / "lfw_funneled").mkdir()
    assert LfwData.found_in(tmp_path, "pairs.txt").root == folder
    with pytest.raises(ValueError, match=r"there is no list 'other\.txt': expected it in .*lfw_funneled or "):
        LfwData.found_in(tmp_path, "other").pairs("other")
