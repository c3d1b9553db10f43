"""Lists of pairs: which two images, and whether they show the same."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from dcnet.arrays import as_tensor
from dcnet.data.lists import bad_line, numbered_lines

ANSWERS = {"1": True, "same": True, "0": False, "different": False}


@dataclass(frozen=True)
class Pairs:
    """P pairs of images.

    Args:
        first: int64 [P], the index of the one image of each pair.
        second: int64 [P], of the other.
        same: bool [P], whether both show the same.
        folds: int64 [P], the fold of each pair; None without folds.
        names: the images that the indices count, each once, as files below a folder; none where they are no files.
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
        """Pairs of two names of files and an answer; every image gets its index where it is first named."""
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
        """The pairs by names; pairs of images that are no files have none."""
        if len(self) and not self.names:
            raise ValueError(f"these {len(self):,} pairs have no names of files, as those of `read_pairs` have")
        found = zip(self.first.tolist(), self.second.tolist(), self.same.tolist(), strict=True)
        return [(self.names[first], self.names[second], same) for first, second, same in found]


@dataclass(frozen=True)
class Disjoint:
    """The pairs of people who were not trained on.

    Args:
        pairs: those that are kept, with their folds.
        same: how many of them show the same person.
        different: how many show two.
        left_out: how many pairs have a person who was trained on.
        people_left_out: how many people of the pairs were trained on.
    """

    pairs: Pairs
    same: int
    different: int
    left_out: int
    people_left_out: int


def folder_of(name: str) -> str:
    """The name of the folder that an image is in, which may be that of a person; nothing for one that is in none."""
    return PurePosixPath(name).parent.name


def labels_by_folder(pairs: Pairs) -> Tensor | None:
    """The class of each image as a number int64, by the folder it is in; None where the folders are no classes.

    They are where each image is in a folder, two images of a pair are in one folder exactly if they show the same, and
    some folder has two images.
    """
    folders = [folder_of(name) for name in pairs.names]
    numbers = {folder: number for number, folder in enumerate(dict.fromkeys(folders))}
    labels = torch.tensor([numbers[folder] for folder in folders], dtype=torch.int64, device="cpu")
    if "" in numbers or len(numbers) == len(folders):
        return None
    agree = (labels[pairs.first] == labels[pairs.second]) == pairs.same
    return labels if agree.all() else None


def people_disjoint(pairs: Pairs, trained_people: Iterable[str]) -> Disjoint:
    """Leaves out every pair in which there is a person who was trained on, by the folders that the images are in.

    An image that is in no folder shows nobody who was trained on.
    """
    trained, rows = set(trained_people) - {""}, pairs.rows()
    people = {name: folder_of(name) for name in pairs.names}
    if not rows:
        raise ValueError("there are no pairs to leave any out of: give one or more")
    keep = [at for at, row in enumerate(rows) if not {people[row[0]], people[row[1]]} & trained]
    if not keep:
        raise ValueError(f"no pair is left: all {len(rows):,} pairs have a person who was trained on")
    folds = None if pairs.folds is None else pairs.folds[keep].tolist()
    kept = Pairs.of_names([rows[at] for at in keep], folds)
    same = int(kept.same.sum())
    return Disjoint(kept, same, len(kept) - same, len(rows) - len(keep), len(trained & set(people.values())))


def read_pairs(file: Path | str, root: Path | str | None = None) -> Pairs:
    """Pairs from a file with two paths and 1 or 0, or same or different, on each line.

    Args:
        file: its lines are separated by commas, tabs or spaces, the first of these that there is; a path with spaces
            needs commas or tabs. Empty lines, and lines that begin with #, are skipped.
        root: where the paths begin; None for the folder of the file.
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
            raise bad_line(file, number, text, f"images that are there, but there is no {base / name}")
    return parts[0], parts[1], ANSWERS[parts[2].lower()]
