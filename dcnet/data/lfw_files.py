"""Labeled Faces in the Wild: its folders, its lists of people, and where the faces are in its files."""

from dataclasses import dataclass
from pathlib import Path

from dcnet.data.decode import read_rgb
from dcnet.data.image_files import ImageFiles, people_folders
from dcnet.data.imagefolder import SUFFIXES
from dcnet.data.lists import bad_line, numbered_lines

PERSON = "a person: name<tab>number of images"
# The faces of the original files, of 250 x 250, are in the middle; what has another size was cut out by somebody.
ORIGINAL, FACE, SIDE = (250, 250), 128, 96


@dataclass(frozen=True)
class LfwFiles:
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

    def people(self, name: str = "peopleDevTrain") -> dict[str, tuple[str, ...]]:
        """The images of each person of a list, such as "peopleDevTrain", in the order of the list."""
        file = self.list_file(name)
        (number, header), *lines = numbered_lines(file) or [(1, "")]
        if not is_number(header):
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

    def faces(self, names: tuple[str, ...]) -> ImageFiles:
        """The faces 96 x 96: of original files the central 128 x 128, of files that were cut out already all."""
        original = read_rgb(self.root / names[0]).size == ORIGINAL
        return self.images(names, SIDE, FACE if original else None)

    def list_file(self, name: str) -> Path:
        """The file of a list, in the folder of the people or beside it."""
        folders = [self.root, self.root.parent] if self.lists is None else [Path(self.lists)]
        file = name if name.endswith(".txt") else f"{name}.txt"
        for folder in folders:
            if (folder / file).is_file():
                return folder / file
        places = " or ".join(str(folder) for folder in folders)
        raise ValueError(f"there is no list {file!r}: expected it in {places}")

    def _person(self, file: Path, line: tuple[int, str]) -> tuple[str, tuple[str, ...]]:
        parts = line[1].split()
        if len(parts) != 2 or not is_number(parts[1]):
            raise bad_line(file, *line, PERSON)
        return parts[0], tuple(self.image_of(file, line, parts[0], at + 1) for at in range(int(parts[1])))

    def image_of(self, file: Path, line: tuple[int, str], person: str, number: int) -> str:
        """The name of an image that a line of a list names."""
        if "/" in person or "\\" in person or person.startswith("."):
            raise bad_line(file, *line, "names of people, which are folders, and no paths")
        name = f"{person}/{person}_{number:04d}"
        for suffix in SUFFIXES:
            if (self.root / f"{name}{suffix}").is_file():
                return f"{name}{suffix}"
        raise bad_line(file, *line, f"images that are there, but there is no {self.root / name}.jpg")


def is_number(text: str) -> bool:
    """Whether it is a whole number above 0."""
    return text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0
