"""Labeled Faces in the Wild: its folders, and its lists of pairs and of people."""

from dataclasses import dataclass
from pathlib import Path

from dcnet.data.imagefolder import SUFFIXES
from dcnet.verification.image_files import ImageFiles, people_folders
from dcnet.verification.pairs import Pairs, bad_line, numbered_lines

HEADER = "folds and pairs, such as '10<tab>300', or a number of pairs, such as '500'"
SAME = "a pair of one person: name<tab>number<tab>number"
DIFFERENT = "a pair of two people: name<tab>number<tab>name<tab>number"
PERSON = "a person: name<tab>number of images"
Row = tuple[str, str, bool]


@dataclass(frozen=True)
class LfwData:
    """LFW in its own layout, folder/Person/Person_0001.jpg, whether funneled or not; lists are read when asked for.

    Args:
        folder: with a folder for each person.
        lists: the folder with pairs.txt, peopleDevTrain.txt and the like; None for `folder`, or the one that it is in.
    """

    folder: Path | str
    lists: Path | str | None = None

    def __post_init__(self) -> None:
        if not self.root.is_dir():
            raise ValueError(f"there is no folder {str(self.folder)!r}: expected one with Person/Person_0001.jpg in it")

    @property
    def root(self) -> Path:
        return Path(self.folder)

    def pairs(self, name: str = "pairs") -> Pairs:
        """The pairs of a list, such as "pairs" with its ten folds, or "pairsDevTest" with none."""
        file = self._list(name)
        (number, header), *lines = numbered_lines(file) or [(1, "")]
        folds, count = _header(file, number, header)
        total = 2 * count * (folds or 1)
        if len(lines) != total:
            raise ValueError(f"{file} has {len(lines)} pairs: expected {total}, as its first line says, {header!r}")
        rows = [self._pair(file, line, at % (2 * count) < count) for at, line in enumerate(lines)]
        return Pairs.of_names(rows, [at // (2 * count) for at in range(total)] if folds else None)

    def people(self, name: str = "peopleDevTrain") -> dict[str, tuple[str, ...]]:
        """The images of each person of a list, such as "peopleDevTrain", in the order of the list."""
        file = self._list(name)
        (number, header), *lines = numbered_lines(file) or [(1, "")]
        if not _is_number(header):
            raise bad_line(file, number, header, "the number of people, such as '4038'")
        if len(lines) != int(header):
            raise ValueError(f"{file} has {len(lines)} people: expected {header}, as its first line says")
        found: dict[str, tuple[str, ...]] = {}
        for line in lines:
            person, images = self._person(file, line)
            if person in found:
                raise bad_line(file, *line, "each person once, but this one is named before")
            found[person] = images
        return found

    def everyone(self) -> dict[str, tuple[str, ...]]:
        """The images of each person that there is a folder of."""
        return people_folders(self.root)

    def images(self, names: tuple[str, ...], size: int, crop: int | None = None) -> ImageFiles:
        """Images by their names, decoded when they are wanted, as `ImageFiles`."""
        return ImageFiles(self.root, tuple(names), size, crop)

    def _list(self, name: str) -> Path:
        folders = [self.root, self.root.parent] if self.lists is None else [Path(self.lists)]
        file = name if name.endswith(".txt") else f"{name}.txt"
        for folder in folders:
            if (folder / file).is_file():
                return folder / file
        places = " or ".join(str(folder) for folder in folders)
        raise ValueError(f"there is no list {file!r}: expected it in {places}")

    def _pair(self, file: Path, line: tuple[int, str], same: bool) -> Row:
        number, text = line
        parts = text.split()
        # Of one person there are name, number, number; of two, name, number, name, number.
        images = [parts[:2], [parts[0], *parts[2:]]] if same else [parts[:2], parts[2:]]
        right = len(parts) == (3 if same else 4) and all(_is_number(of[1]) for of in images)
        if not right or images[0] == images[1] or (not same and images[0][0] == images[1][0]):
            raise bad_line(file, number, text, SAME if same else DIFFERENT)
        first, second = (self._image(file, line, of[0], int(of[1])) for of in images)
        return first, second, same

    def _person(self, file: Path, line: tuple[int, str]) -> tuple[str, tuple[str, ...]]:
        parts = line[1].split()
        if len(parts) != 2 or not _is_number(parts[1]):
            raise bad_line(file, *line, PERSON)
        return parts[0], tuple(self._image(file, line, parts[0], at + 1) for at in range(int(parts[1])))

    def _image(self, file: Path, line: tuple[int, str], person: str, number: int) -> str:
        name = f"{person}/{person}_{number:04d}"
        for suffix in SUFFIXES:
            if (self.root / f"{name}{suffix}").is_file():
                return f"{name}{suffix}"
        raise bad_line(file, *line, f"images that are there, but there is no {self.root / name}.jpg")


def _header(file: Path, number: int, text: str) -> tuple[int, int]:
    """Folds, or 0 for none, and the pairs of each kind in each."""
    parts = text.split()
    if len(parts) not in (1, 2) or not all(_is_number(part) for part in parts):
        raise bad_line(file, number, text, HEADER)
    return (0, int(parts[0])) if len(parts) == 1 else (int(parts[0]), int(parts[1]))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0
