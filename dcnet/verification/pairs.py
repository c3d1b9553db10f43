"""Pairs of images with answers: read from lists, folders of people or LFW, or sampled by labels."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from dcnet.checks import Numbers, as_tensor, check_whole
from dcnet.data.batches import make_generator
from dcnet.data.image_folder import image_names, labels_of, people_folders
from dcnet.data.lfw import FOLDERS, LfwFiles, bad_line, is_number, numbered_lines

ANSWERS = {"1": True, "same": True, "0": False, "different": False}


@dataclass(frozen=True)
class Pairs:
    """P pairs of images.

    Args:
        first: indices of the first image of each pair, int64 [P].
        second: indices of the second image.
        same: whether both images show the same person or class, bool [P].
        folds: the fold of each pair, int64 [P]; None without folds.
        names: the files that the indices refer to, relative to a folder; empty if the images are not files.
    """

    first: Tensor
    second: Tensor
    same: Tensor
    folds: Tensor | None = None
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("first", "second", "same", "folds"):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, as_tensor(given, f"{name} of pairs"))

    def __len__(self) -> int:
        return len(self.same)

    @classmethod
    def of_names(cls, pairs: Iterable[tuple[str, str, bool]], folds: Sequence[int] | None = None) -> "Pairs":
        """Pairs of two file names and an answer; images are indexed in the order of their first use."""
        rows = list(pairs)
        names = tuple(dict.fromkeys(name for first, second, _ in rows for name in (first, second)))
        index = {name: at for at, name in enumerate(names)}
        indices = torch.tensor(
            [(index[first], index[second]) for first, second, _ in rows], dtype=torch.int64, device="cpu"
        )
        first, second = indices.view(-1, 2).T.contiguous()
        same = torch.tensor([same for *_, same in rows], dtype=torch.bool, device="cpu")
        return cls(first, second, same, None if folds is None else torch.tensor(folds, device="cpu"), names)

    def rows(self) -> list[tuple[str, str, bool]]:
        """The pairs by file names."""
        if len(self) and not self.names:
            raise ValueError(f"these {len(self):,} pairs have no file names: use pairs of `read_pairs`")
        found = zip(self.first.tolist(), self.second.tolist(), self.same.tolist(), strict=True)
        return [(self.names[first], self.names[second], same) for first, second, same in found]


@dataclass(frozen=True)
class Disjoint:
    """The pairs without people of the training set.

    Args:
        pairs: the remaining pairs, with their folds.
        same: how many of them show one person.
        different: how many show two people.
        left_out: how many pairs show a person of the training set.
        people_left_out: how many people of the pairs are in the training set.
    """

    pairs: Pairs
    same: int
    different: int
    left_out: int
    people_left_out: int


def folder_of(name: str) -> str:
    """The name of the folder of an image, such as that of a person; empty without a folder."""
    return PurePosixPath(name).parent.name


def labels_by_folder(pairs: Pairs) -> Tensor | None:
    """The class of each image by its folder, as int64; None if folders are not classes.

    Folders are classes if each image is in a folder, the two images of a pair are in one folder exactly if the pair is
    genuine, and some folder has two images.
    """
    folders = [folder_of(name) for name in pairs.names]
    numbers = {folder: number for number, folder in enumerate(dict.fromkeys(folders))}
    labels = torch.tensor([numbers[folder] for folder in folders], dtype=torch.int64, device="cpu")
    if "" in numbers or len(numbers) == len(folders):
        return None
    agree = (labels[pairs.first] == labels[pairs.second]) == pairs.same
    return labels if agree.all() else None


def people_disjoint(pairs: Pairs, trained_people: Iterable[str]) -> Disjoint:
    """Removes every pair with a person of the training set, by the folders of the images.

    An image without a folder counts as a person outside of the training set.
    """
    trained, rows = set(trained_people) - {""}, pairs.rows()
    people = {name: folder_of(name) for name in pairs.names}
    if not rows:
        raise ValueError("there are no pairs: give one or more")
    keep = [at for at, row in enumerate(rows) if not {people[row[0]], people[row[1]]} & trained]
    if not keep:
        raise ValueError(f"no pair is left: all {len(rows):,} pairs have a person of the training set")
    folds = None if pairs.folds is None else pairs.folds[keep].tolist()
    kept = Pairs.of_names([rows[at] for at in keep], folds)
    same = int(kept.same.sum())
    return Disjoint(kept, same, len(kept) - same, len(rows) - len(keep), len(trained & set(people.values())))


def read_pairs(file: Path | str, root: Path | str | None = None) -> Pairs:
    """Reads pairs from a file: each line has two paths, and 1 or 0, or same or different.

    Args:
        file: fields are separated by commas, tabs or spaces, in this preference; a path with spaces needs commas or
            tabs. Empty lines, and lines that start with #, are skipped.
        root: the folder that the paths are relative to; None for the folder of the file.
    """
    file = Path(file)
    base = file.parent if root is None else Path(root)
    rows = [_pair(file, base, number, text) for number, text in numbered_lines(file) if not text.startswith("#")]
    if not rows:
        raise ValueError(f"{file} has no pairs: expected lines such as 'a/1.jpg,b/1.jpg,0'")
    return Pairs.of_names(rows)


def _pair(file: Path, base: Path, number: int, text: str) -> tuple[str, str, bool]:
    separator = next((mark for mark in ",\t" if mark in text), None)
    parts = [part.strip() for part in text.split(separator)]
    if len(parts) != 3 or parts[2].lower() not in ANSWERS:
        raise bad_line(file, number, text, "two paths and one of 0, 1, same, different")
    for name in parts[:2]:
        if not (base / name).is_file():
            raise bad_line(file, number, text, f"existing images, but there is no {base / name}")
    return parts[0], parts[1], ANSWERS[parts[2].lower()]


# Above this number of pairs, no permutation of all is made: for a class of 100,000 images it would take 40 GB.
LARGEST_PERMUTATION = 2**24


def sample_pairs(labels: Numbers, count: int, seed: int = 0) -> Pairs:
    """Random distinct pairs of images by their labels: half genuine, half impostor.

    Genuine pairs are divided evenly among the classes, as far as they have enough.

    Args:
        labels: integers [N].
        count: the number of pairs, an even number.
        seed: the same seed gives the same pairs.
    """
    if count < 2 or count % 2:
        raise ValueError(f"count must be even and at least 2, for pairs of both kinds, not {count}")
    labels = as_tensor(labels, "labels").cpu()
    if labels.dim() != 1 or labels.is_floating_point():
        raise ValueError(f"labels must be integers [N], not {labels.dtype} {list(labels.shape)}")
    genuine = _genuine(labels, count // 2, make_generator(seed, 1))
    impostor = _impostor(labels, count // 2, make_generator(seed, 2))
    both = torch.cat([genuine, impostor])
    same = torch.arange(count, device="cpu") < count // 2
    return Pairs(both[:, 0].contiguous(), both[:, 1].contiguous(), same)


def _genuine(labels: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Pairs [count, 2] of images of one class, divided evenly among the classes."""
    members = [(labels == label).nonzero()[:, 0] for label in labels.unique()]
    possible = [math.comb(len(of_class), 2) for of_class in members]
    shares = _even_shares(possible, count)
    found = [torch.empty(0, 2, dtype=torch.int64, device="cpu")]
    for of_class, total, share in zip(members, possible, shares, strict=True):
        if share:
            found.append(of_class[_pair_of_rank(_draw(total, share, generator))])
    return torch.cat(found)


def _draw(total: int, count: int, generator: torch.Generator) -> Tensor:
    """`count` distinct numbers below `total`."""
    if total <= LARGEST_PERMUTATION:
        return torch.randperm(total, generator=generator, device="cpu")[:count]
    found: dict[int, None] = {}
    while len(found) < count:
        found.update(dict.fromkeys(torch.randint(total, (count,), generator=generator, device="cpu").tolist()))
    return torch.tensor(list(found)[:count], device="cpu")


def _even_shares(possible: list[int], count: int) -> list[int]:
    """The number of pairs from each class, `count` in all: an equal share, or all that a smaller class has."""
    if sum(possible) < count:
        raise ValueError(f"there are only {sum(possible):,} pairs of one class, not {count:,}: ask for fewer")
    shares, left = [0] * len(possible), count
    order = sorted(range(len(possible)), key=possible.__getitem__)
    for place, label in enumerate(order):
        shares[label] = min(possible[label], left // (len(order) - place))
        left -= shares[label]
    return shares


def _pair_of_rank(rank: Tensor) -> Tensor:
    """The pairs (i, j), i < j, at these ranks of (0, 1), (0, 2), (1, 2), (0, 3), ...; [len(rank), 2]."""
    high = ((1 + (1 + 8 * rank.double()).sqrt()) / 2).long()
    return torch.stack([rank - high * (high - 1) // 2, high], dim=1)


def _impostor(labels: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Pairs [count, 2] of images of different classes."""
    images = len(labels)
    possible = math.comb(images, 2) - sum(math.comb(int(size), 2) for size in labels.unique(return_counts=True)[1])
    if possible < count:
        raise ValueError(f"there are only {possible:,} pairs of two classes, not {count:,}: ask for fewer")
    found: dict[int, None] = {}
    while len(found) < count:
        drawn = torch.randint(images, (2 * count, 2), generator=generator, device="cpu").sort(1).values
        drawn = drawn[labels[drawn[:, 0]] != labels[drawn[:, 1]]]
        # A dict keeps the order of the draws, so that all pairs are equally likely.
        found.update(dict.fromkeys((drawn[:, 0] * images + drawn[:, 1]).tolist()))
    keys = torch.tensor(list(found)[:count], device="cpu")
    return torch.stack([keys // images, keys % images], dim=1)


# The most pairs of each kind of a folder.
MOST_PAIRS = 2_000_000


def folder_pairs(root: Path | str, most: int = MOST_PAIRS, seed: int = 0) -> Pairs:
    """The pairs of `all_pairs` of a folder with one folder per person; their names are person/image."""
    if Path(root).is_dir() and image_names(Path(root)) and not any(entry.is_dir() for entry in Path(root).iterdir()):
        raise ValueError(f"{root} has images, but no folders: expected one folder of images for each person")
    names = tuple(name for images in people_folders(root).values() for name in images)
    labels, people = labels_of(names)
    if not count_genuine(labels):
        raise ValueError(f"{root} has no person with two images, so it has no genuine pair: add images")
    if len(people) < 2:
        raise ValueError(f"{root} has one person, {next(iter(people))!r}, so it has no impostor pair: add people")
    return dataclasses.replace(all_pairs(labels, most, seed), names=names)


def all_pairs(labels: Numbers, most: int = MOST_PAIRS, seed: int = 0) -> Pairs:
    """All pairs of images by their labels, or a random part of them.

    Args:
        labels: integers [N].
        most: the largest number of pairs of each kind; genuine pairs are then divided evenly among the classes.
        seed: the same seed gives the same part.
    """
    check_whole("most", most, 1)
    ordered, order = as_tensor(labels, "labels").cpu().sort(stable=True)
    same = _genuine(ordered, min(count_genuine(ordered), most), make_generator(seed, 1))
    # An image forms impostor pairs with all images after the last one of its class.
    ends = (len(ordered) - torch.searchsorted(ordered, ordered, right=True)).cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    ranks = torch.arange(total, device="cpu") if total <= most else _draw(total, most, make_generator(seed, 2))
    first = torch.searchsorted(ends, ranks, right=True)
    both = order[torch.cat([same, torch.stack([first, len(ordered) - ends[first] + ranks], dim=1)])]
    answers = torch.arange(len(both), device="cpu") < len(same)
    return Pairs(both[:, 0].contiguous(), both[:, 1].contiguous(), answers)


def count_genuine(labels: Tensor) -> int:
    """The number of all pairs of two images with the same label."""
    return sum(math.comb(size, 2) for size in labels.unique(return_counts=True)[1].tolist())


SAME = "a pair of one person: name<tab>number<tab>number"
DIFFERENT = "a pair of two people: name<tab>number<tab>name<tab>number"


@dataclass(frozen=True)
class LfwData(LfwFiles):
    """LFW in its original layout, with its lists of pairs."""

    @classmethod
    def found_in(cls, folder: Path | str, name: str = "pairs") -> "LfwData":
        """LFW in the folder, or in a subfolder with a usual name of LFW; the first of them that has the list."""
        folder = Path(folder)
        inside = [folder / own for own in FOLDERS if (folder / own).is_dir()]
        found = [cls(root) for root in inside or [folder]]
        return next((data for data in found if data.has_list(name)), found[0])

    def has_list(self, name: str) -> bool:
        try:
            return self.list_file(name).is_file()
        except ValueError:
            return False

    def pairs(self, name: str = "pairs") -> Pairs:
        """The pairs of a list, such as "pairs" with ten folds, or "pairsDevTest" without folds."""
        file = self.list_file(name)
        (number, header), *lines = numbered_lines(file) or [(1, "")]
        sizes = header.split()
        if len(sizes) not in (1, 2) or not all(map(is_number, sizes)):
            expected = "folds and pairs, such as '10<tab>300', or a number of pairs, such as '500'"
            raise bad_line(file, number, header, expected)
        # Without folds there is one number.
        folds, count = int(sizes[0]) if len(sizes) == 2 else 0, int(sizes[-1])
        total = 2 * count * (folds or 1)
        if len(lines) != total:
            raise ValueError(f"{file} has {len(lines)} pairs: expected {total} by its first line, {header!r}")
        rows = [self._pair(file, line, at % (2 * count) < count) for at, line in enumerate(lines)]
        return Pairs.of_names(rows, [at // (2 * count) for at in range(total)] if folds else None)

    def _pair(self, file: Path, line: tuple[int, str], same: bool) -> tuple[str, str, bool]:
        number, text = line
        parts = text.split()
        # One person: name, number, number. Two people: name, number, name, number.
        images = [parts[:2], [parts[0], *parts[2:]]] if same else [parts[:2], parts[2:]]
        right = len(parts) == (3 if same else 4) and all(is_number(of[1]) for of in images)
        if not right or images[0] == images[1] or (not same and images[0][0] == images[1][0]):
            raise bad_line(file, number, text, SAME if same else DIFFERENT)
        first, second = (self.image_of(file, line, of[0], int(of[1])) for of in images)
        return first, second, same
