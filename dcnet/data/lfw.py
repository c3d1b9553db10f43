"""LFW: its files and lists, and the dataset of its development split."""

from dataclasses import dataclass
from pathlib import Path

from dcnet.data.dataset import Dataset, Split
from dcnet.data.decode import ImageFiles, read_rgb
from dcnet.data.download import missing_dataset
from dcnet.data.image_folder import SUFFIXES, labels_of, people_folders
from dcnet.data.load import register
from dcnet.files import reason_of

PERSON = "a person: name<tab>number of images"
# Size of the original files, which have the face in the middle; files of another size are cropped already.
ORIGINAL, FACE, SIDE = (250, 250), 128, 96
# The largest list in bytes; a list of a million pairs has fewer.
MAX_LIST = 1 << 28
# Number of characters of a line that an error shows.
SHOWN = 200


def numbered_lines(file: Path) -> list[tuple[int, str]]:
    """The non-empty lines of a file, with their numbers from 1."""
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_LIST + 1)
        lines = content.decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read as a list: {reason_of(error)}") from None
    if len(content) > MAX_LIST:
        raise ValueError(f"{file} cannot be read as a list: it has more than {MAX_LIST:,} bytes")
    return [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]


def bad_line(file: Path, number: int, text: str, expected: str) -> ValueError:
    """The error for an invalid line of a list."""
    shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
    return ValueError(f"{file}, line {number}: {shown!r}: expected {expected}")


@dataclass(frozen=True)
class LfwFiles:
    """LFW in its original layout, folder/Person/Person_0001.jpg, funneled or not; lists are read on demand.

    Args:
        folder: a folder with one folder per person.
        lists: the folder of pairs.txt, peopleDevTrain.txt and others; None for `folder` or its parent.
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
                raise bad_line(file, *line, "each person once, but this one is listed before")
            found[person] = images
        return found

    def everyone(self) -> dict[str, tuple[str, ...]]:
        """The images of every person with a folder."""
        return people_folders(self.root)

    def images(self, names: tuple[str, ...], size: int, crop: int | None = None) -> ImageFiles:
        """Images by name, decoded on access."""
        return ImageFiles(self.root, tuple(names), size, crop)

    def faces(self, names: tuple[str, ...]) -> ImageFiles:
        """The faces at 96 x 96: the central 128 x 128 pixels of original files, the whole image of cropped ones."""
        original = read_rgb(self.root / names[0]).size == ORIGINAL
        return self.images(names, SIDE, FACE if original else None)

    def list_file(self, name: str) -> Path:
        """The file of a list, in the folder of people or its parent."""
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
        """The file name of an image listed in a line."""
        if "/" in person or "\\" in person or person.startswith("."):
            raise bad_line(file, *line, "names of people, not paths")
        name = f"{person}/{person}_{number:04d}"
        for suffix in SUFFIXES:
            if (self.root / f"{name}{suffix}").is_file():
                return f"{name}{suffix}"
        raise bad_line(file, *line, f"images that exist, but there is no {self.root / name}.jpg")


def is_number(text: str) -> bool:
    """True for a whole number above 0."""
    return text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0


URL = "http://vis-www.cs.umass.edu/lfw/"
FOLDERS = ("lfw-deepfunneled", "lfw_funneled", "lfw")
LIST = "peopleDevTrain"
# People with fewer images are left out; of people with this many, one image is held out for the test.
MIN_IMAGES, MIN_HELD_OUT = 2, 5
ABOUT = "faces, 96 x 96, color, 1,184 people of LFW's peopleDevTrain, 6,373 + 298 images; download it yourself"


@register("lfw", ABOUT)
def load_lfw(folder: Path, download: bool = False) -> Dataset:
    """The people of peopleDevTrain with at least two images, one class each, in the order of the list.

    The test split has the last image of each person with at least five. It shows whether training works, not how well
    unseen people are verified, which is the purpose of LFW. There is nothing to download.
    """
    files = find_lfw(folder)
    people = trained_people(files)
    test = tuple(images[-1] for images in people.values() if len(images) >= MIN_HELD_OUT)
    held_out = set(test)
    train = tuple(name for images in people.values() for name in images if name not in held_out)
    if not test:
        raise ValueError(
            f"{files.root} has too few images: expected a person with {MIN_HELD_OUT} or more in {LIST}.txt"
        )
    numbers = {person: number for number, person in enumerate(people)}
    return Dataset("lfw", _split(files, train, numbers), _split(files, test, numbers), tuple(people))


def find_lfw(folder: Path | str) -> LfwFiles:
    """LFW in the folder, or in a subfolder with a usual name of LFW; the list of people is in it or beside it."""
    folder = Path(folder)
    roots = [folder / name for name in FOLDERS if (folder / name).is_dir()] or [folder]
    for root in roots:
        if any((place / f"{LIST}.txt").is_file() for place in (root, root.parent)) and root.is_dir():
            return LfwFiles(root)
    names = ", ".join(FOLDERS[:-1])
    expected = f"{names} or {FOLDERS[-1]} with Person/Person_0001.jpg, and {LIST}.txt in it or beside it"
    raise missing_dataset("lfw", folder, expected, URL)


def trained_people(files: LfwFiles) -> dict[str, tuple[str, ...]]:
    """The images of people with at least two images, in the order of the list."""
    people = {person: images for person, images in files.people(LIST).items() if len(images) >= MIN_IMAGES}
    if len(people) < 2:
        raise ValueError(
            f"{files.list_file(LIST)} has too few people: expected two or more with {MIN_IMAGES} images each"
        )
    return people


def _split(files: LfwFiles, names: tuple[str, ...], numbers: dict[str, int]) -> Split:
    return Split(files.faces(names).stack(), labels_of(names, numbers)[0])
