"""Pairs: lists of paths, LFW and its lists, and pairs sampled by labels."""

from collections import Counter
from itertools import combinations
from math import comb

import pytest
import torch
from helpers.largest_tensor import Largest
from helpers.lfw_folder import PAIRS, write_image, write_lfw
from hypothesis import given
from hypothesis import strategies as st

from dcnet.verification import (
    LfwData,
    Pairs,
    all_pairs,
    folder_pairs,
    people_disjoint,
    read_pairs,
    sample_pairs,
)
from dcnet.verification.pairs import _pair_of_rank


@pytest.fixture
def folder(tmp_path):
    return write_lfw(tmp_path / "lfw")


def test_lfw_pairs_with_folds(folder):
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


def test_lfw_pairs_without_folds_and_with_other_separators(folder):
    found = LfwData(folder).pairs("pairsDevTest.txt")
    assert found.same.tolist() == [True, False]
    assert found.folds is None
    (folder / "pairs.txt").write_text(PAIRS.replace("\t", "  ").replace("\n", "\r\n") + "\n\n")
    assert LfwData(str(folder)).pairs("pairs").folds.tolist() == [0, 0, 1, 1]


def test_folds_with_several_pairs_of_each_kind(folder):
    same, other = "Ada_One 1 2\nAda_One 1 3\n", "Ada_One 1 Bob_Two 1\nAda_One 1 Bob_Two 2\n"
    (folder / "pairs.txt").write_text(f"2 2\n{same}{other}{same}{other}")
    found = LfwData(folder).pairs()
    assert found.same.tolist() == [True, True, False, False] * 2
    assert found.folds.tolist() == [0] * 4 + [1] * 4


def test_people_of_a_list_and_of_all_folders(folder):
    data = LfwData(folder)
    ada = tuple(f"Ada_One/Ada_One_000{number}.jpg" for number in (1, 2, 3))
    assert data.people("peopleDevTrain") == {"Ada_One": ada, "Cy_Three": ("Cy_Three/Cy_Three_0001.jpg",)}
    assert {person: len(images) for person, images in data.everyone().items()} == {
        "Ada_One": 3,
        "Bob_Two": 2,
        "Cy_Three": 1,
        "Di_Four": 2,
    }


def test_lists_are_found_beside_the_folder_or_in_another(folder, tmp_path):
    (folder / "pairs.txt").rename(tmp_path / "pairs.txt")
    assert len(LfwData(folder).pairs()) == 4
    (tmp_path / "lists").mkdir()
    (tmp_path / "pairs.txt").rename(tmp_path / "lists" / "pairs.txt")
    assert len(LfwData(folder, tmp_path / "lists").pairs()) == 4
    with pytest.raises(ValueError, match=r"there is no list 'pairs.txt': expected it in .*lfw or "):
        LfwData(folder).pairs()
    with pytest.raises(ValueError, match="there is no folder"):
        LfwData(tmp_path / "nowhere")


def test_lfw_images_may_have_another_format(tmp_path):
    assert LfwData(write_lfw(tmp_path, ".png")).pairs().names[0] == "Ada_One/Ada_One_0001.png"


@pytest.mark.parametrize(
    ("old", "new", "message"),
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
        ("2\t1\n", "3\t1\n", r"has 4 pairs: expected 6 by its first line, '3\\t1'"),
        ("2\t1\n", "1\n", "has 4 pairs: expected 2 by its first line, '1'"),
        (PAIRS, "", "line 1: '': expected folds and pairs"),
    ],
)
def test_errors_name_the_invalid_line_of_a_pair_list(folder, old, new, message):
    (folder / "pairs.txt").write_text(PAIRS.replace(old, new))
    with pytest.raises(ValueError, match=message):
        LfwData(folder).pairs()


@pytest.mark.parametrize(
    ("text", "message"),
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
def test_errors_name_the_invalid_line_of_a_list_of_people(folder, text, message):
    (folder / "peopleDevTrain.txt").write_text(text)
    with pytest.raises(ValueError, match=message):
        LfwData(folder).people("peopleDevTrain")


def test_binary_files_are_rejected_as_lists(folder):
    (folder / "pairs.txt").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ValueError, match=r"pairs\.txt cannot be read as a list"):
        LfwData(folder).pairs()


def test_people_disjoint_removes_pairs_with_trained_people(folder):
    found = people_disjoint(LfwData(folder).pairs(), ["Cy_Three", "Somebody_Else"])
    assert [row[2] for row in found.pairs.rows()] == [True, True, False]
    assert found.pairs.folds.tolist() == [0, 1, 1]
    assert (found.same, found.different, found.left_out, found.people_left_out) == (2, 1, 1, 1)
    assert "Cy_Three/Cy_Three_0001.jpg" not in found.pairs.names
    assert "Bob_Two/Bob_Two_0001.jpg" not in found.pairs.names
    both = people_disjoint(LfwData(folder).pairs("pairsDevTest"), ["Cy_Three"])
    assert both.pairs.folds is None
    with pytest.raises(ValueError, match="no pair is left: all 4 pairs have a person of the training set"):
        people_disjoint(LfwData(folder).pairs(), ["Ada_One", "Bob_Two", "Di_Four"])


def test_people_disjoint_requires_file_names():
    with pytest.raises(ValueError, match="these 6 pairs have no file names: use pairs of `read_pairs`"):
        people_disjoint(sample_pairs(torch.arange(10) % 3, 6), ["Ada_One"])


def test_images_without_a_folder_count_as_untrained():
    pairs = Pairs.of_names([("1.jpg", "a/2.jpg", True), ("1.jpg", "b/2.jpg", False)])
    found = people_disjoint(pairs, ["a", ""])
    assert found.pairs.rows() == [("1.jpg", "b/2.jpg", False)]
    assert (found.left_out, found.people_left_out) == (1, 1)


def test_found_in_takes_the_folder_or_its_parent(folder, tmp_path):
    for data in (folder, tmp_path):
        assert LfwData.found_in(data, "pairs").root == folder
    (folder / "pairs.txt").rename(tmp_path / "pairs.txt")
    assert len(LfwData.found_in(tmp_path, "pairs").pairs("pairs")) == 4
    with pytest.raises(ValueError, match="there is no folder"):
        LfwData.found_in(tmp_path / "nowhere", "pairs")


def test_found_in_prefers_the_folder_with_the_list(folder, tmp_path):
    (tmp_path / "lfw_funneled").mkdir()
    assert LfwData.found_in(tmp_path, "pairs.txt").root == folder
    with pytest.raises(ValueError, match=r"there is no list 'other\.txt': expected it in .*lfw_funneled or "):
        LfwData.found_in(tmp_path, "other").pairs("other")


@pytest.mark.parametrize(
    "text", ["a/1.png,b/1.png,0\na/1.png,a/2.png,1\n", "a/1.png  b/1.png different\n#\n\na/1.png\ta/2.png\tSame"]
)
def test_read_pairs(tmp_path, text):
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
    ("text", "message"),
    [
        ("a.png a.png 1\na.png b.png 0\n", r"list.txt, line 2: 'a.png b.png 0': .* there is no .*b.png"),
        ("\na.png a.png 2\n", "line 2: 'a.png a.png 2': expected two paths and one of 0, 1, same, different"),
        ("a.png 1\n", "line 1: 'a.png 1': expected two paths"),
        ("a.png a.png a.png 1\n", "line 1: .* expected two paths"),
        ("# nothing\n", "has no pairs: expected lines such as 'a/1.jpg,b/1.jpg,0'"),
    ],
)
def test_read_pairs_names_the_invalid_line(tmp_path, text, message):
    write_image(tmp_path / "a.png", 1)
    (tmp_path / "list.txt").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_pairs(tmp_path / "list.txt")


@given(st.lists(st.integers(0, 3), min_size=4, max_size=30), st.integers(1, 30), st.integers(0, 5))
def test_sampled_pairs_are_balanced_correct_and_distinct(labels, half, seed):
    sizes = Counter(labels).values()
    genuine = sum(comb(size, 2) for size in sizes)
    impostor = comb(len(labels), 2) - genuine
    if min(genuine, impostor) < half:
        kind = "one class" if genuine < half else "two classes"
        with pytest.raises(ValueError, match=f"pairs of {kind}, not {half}: ask for fewer"):
            sample_pairs(torch.tensor(labels), 2 * half, seed)
        return
    found = sample_pairs(torch.tensor(labels), 2 * half, seed)
    rows = list(zip(found.first.tolist(), found.second.tolist(), found.same.tolist(), strict=True))
    assert all((labels[first] == labels[second]) is same for first, second, same in rows)
    assert all(first != second for first, second, _ in rows)
    assert len({frozenset(row[:2]) for row in rows}) == len(rows) == 2 * half
    assert sum(row[2] for row in rows) == half


def test_genuine_pairs_are_divided_evenly_among_classes():
    labels = torch.tensor([0] * 100 + [1] * 10 + [2] * 2)
    found = sample_pairs(labels, 62)
    assert Counter(labels[found.first[found.same]].tolist()) == {0: 15, 1: 15, 2: 1}


def test_sampled_pairs_depend_on_the_seed():
    labels = torch.arange(200) % 10
    one, again, other = (sample_pairs(labels, 100, seed) for seed in (1, 1, 2))
    assert torch.equal(one.first, again.first)
    assert torch.equal(one.second, again.second)
    assert not torch.equal(one.first, other.first)


def test_all_pairs_are_sampled_equally_often():
    labels = torch.arange(12) % 3
    counts: Counter[tuple[int, int]] = Counter()
    for seed in range(400):
        found = sample_pairs(labels, 12, seed)
        counts.update(tuple(sorted(pair)) for pair in zip(found.first.tolist(), found.second.tolist(), strict=True))
    # Each sample has 6 of 18 genuine and 6 of 48 impostor pairs.
    same = [count for (i, j), count in counts.items() if (i - j) % 3 == 0]
    different = [count for (i, j), count in counts.items() if (i - j) % 3]
    assert (len(same), len(different)) == (18, 48)
    assert min(same) > 133 - 50
    assert max(same) < 133 + 50
    assert min(different) > 50 - 35
    assert max(different) < 50 + 35


def test_pair_of_rank():
    assert _pair_of_rank(torch.arange(6)).tolist() == [[0, 1], [0, 2], [1, 2], [0, 3], [1, 3], [2, 3]]
    large = 10**6
    ranks = torch.tensor([large * (large - 1) // 2 - 1, large * (large - 1) // 2])
    assert _pair_of_rank(ranks).tolist() == [[large - 2, large - 1], [0, large]]


def test_pairs_of_large_classes_are_sampled_without_a_permutation():
    """A class of 100,000 images has 5 billion pairs, and a permutation of them takes 40 GB."""
    labels = torch.arange(200_000) % 2
    with Largest() as largest:
        found = sample_pairs(labels, 2000)
    assert largest.elements <= len(labels)
    assert len(set(zip(found.first.tolist(), found.second.tolist(), strict=True))) == 2000
    assert torch.equal(labels[found.first] == labels[found.second], found.same)
    assert found.second[found.same].max() > 150_000


def test_pairs_sampled_without_a_permutation_are_distinct(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dcnet.verification.pairs.LARGEST_PERMUTATION", 0)
    found = sample_pairs(torch.arange(8) % 2, 24)
    # All 12 genuine pairs.
    assert len(set(zip(found.first[:12].tolist(), found.second[:12].tolist(), strict=True))) == 12


@pytest.mark.parametrize("count", [0, 1, 3])
def test_sample_pairs_rejects_odd_counts(count):
    with pytest.raises(ValueError, match=f"count must be even and at least 2, for pairs of both kinds, not {count}"):
        sample_pairs(torch.arange(4) % 2, count)


def both(pairs):
    """The pairs as sets of two images, genuine and impostor."""
    found = zip(pairs.first.tolist(), pairs.second.tolist(), pairs.same.tolist(), strict=True)
    return [frozenset(row[:2]) for row in found], pairs.same.tolist()


@given(st.lists(st.integers(0, 4), max_size=12))
def test_all_pairs_are_those_of_two_loops(labels):
    found, same = both(all_pairs(torch.tensor(labels, dtype=torch.int64)))
    wanted = {frozenset(pair): labels[pair[0]] == labels[pair[1]] for pair in combinations(range(len(labels)), 2)}
    assert dict(zip(found, same, strict=True)) == wanted
    assert len(found) == len(wanted)


def test_part_of_all_pairs_is_random_and_distinct():
    labels = torch.arange(60) % 7
    found, same = both(all_pairs(labels, most=50, seed=1))
    assert len(set(found)) == 100
    assert same == [True] * 50 + [False] * 50
    for pair, answer in zip(found, same, strict=True):
        first, second = pair
        assert (labels[first] == labels[second]) == answer
    assert both(all_pairs(labels, most=50, seed=1)) == (found, same)
    assert both(all_pairs(labels, most=50, seed=2)) != (found, same)
    # Every impostor pair is possible.
    drawn = Counter(pair for seed in range(40) for pair in both(all_pairs(labels, most=50, seed=seed))[0][50:])
    assert len({image for pair in drawn for image in pair}) == 60
    assert len(drawn) > 1000


def test_pairs_of_a_folder_of_people(folder):
    (folder / "Empty").mkdir()
    found = folder_pairs(folder)
    names = [f"{path.parent.name}/{path.name}" for path in sorted(folder.glob("*/*.jpg"))]
    assert list(found.names) == names
    assert len(found) == comb(len(names), 2)
    for first, second, same in found.rows():
        assert (first.partition("/")[0] == second.partition("/")[0]) == same


def test_folders_without_both_kinds_of_pairs_are_rejected(tmp_path):
    with pytest.raises(ValueError, match=r"there is no folder '.*none': expected one with a folder of images for each"):
        folder_pairs(tmp_path / "none")
    with pytest.raises(ValueError, match="has no images: expected a folder of images for each person"):
        folder_pairs(tmp_path)
    write_image(tmp_path / "Ada" / "1.png", 1)
    with pytest.raises(
        ValueError, match="Ada has images, but no folders: expected one folder of images for each person"
    ):
        folder_pairs(tmp_path / "Ada")
    write_image(tmp_path / "Bob" / "1.png", 2)
    with pytest.raises(ValueError, match="has no person with two images, so it has no genuine pair: add images"):
        folder_pairs(tmp_path)
    (tmp_path / "Bob" / "1.png").rename(tmp_path / "Ada" / "2.png")
    with pytest.raises(ValueError, match="has one person, 'Ada', so it has no impostor pair: add people"):
        folder_pairs(tmp_path)
