"""Faces to train on: the people of LFW's development split who have two images or more."""

from pathlib import Path

from dcnet.data.dataset import Dataset, Split
from dcnet.data.download import missing
from dcnet.data.image_files import labels_of
from dcnet.data.lfw_files import LfwFiles
from dcnet.data.registry import register

URL = "http://vis-www.cs.umass.edu/lfw/"
FOLDERS = ("lfw-deepfunneled", "lfw_funneled", "lfw")
LIST = "peopleDevTrain"
# A person is trained on from so many images on, and one of them is held out from so many on.
LEAST, HELD_OUT = 2, 5
ABOUT = "faces, 96 x 96, colour, 1,184 people of LFW's peopleDevTrain, 6,373 + 298 images; get them from its site"


@register("lfw", ABOUT)
def load_lfw(folder: Path, download: bool = False) -> Dataset:
    """The people of peopleDevTrain with two images or more, one class each, in the order of the list.

    LFW tests with other people; the test images that a data set needs are of the same ones: the last image of everyone
    with five or more, which is not trained on. It tells whether training works, and not how well strangers are told
    apart. There is nothing to download.
    """
    files = find_lfw(folder)
    people = trained_people(files)
    test = tuple(images[-1] for images in people.values() if len(images) >= HELD_OUT)
    held_out = set(test)
    train = tuple(name for images in people.values() for name in images if name not in held_out)
    if not test:
        raise ValueError(f"{files.root} has too few images: expected a person with {HELD_OUT} or more in {LIST}.txt")
    numbers = {person: number for number, person in enumerate(people)}
    return Dataset("lfw", _split(files, train, numbers), _split(files, test, numbers), tuple(people))


def find_lfw(folder: Path | str) -> LfwFiles:
    """The folder itself, or one in it that is called as LFW's are, with the list of people in it or beside it."""
    folder = Path(folder)
    roots = [folder / name for name in FOLDERS if (folder / name).is_dir()] or [folder]
    for root in roots:
        if any((place / f"{LIST}.txt").is_file() for place in (root, root.parent)) and root.is_dir():
            return LfwFiles(root)
    names = ", ".join(FOLDERS[:-1])
    expected = f"{names} or {FOLDERS[-1]} with Person/Person_0001.jpg, and {LIST}.txt in it or beside it"
    raise missing("lfw", folder, expected, URL)


def trained_people(files: LfwFiles) -> dict[str, tuple[str, ...]]:
    """The images of those who are trained on, in the order of the list: nobody can be told apart by one image."""
    people = {person: images for person, images in files.people(LIST).items() if len(images) >= LEAST}
    if len(people) < 2:
        raise ValueError(f"{files.list_file(LIST)} has too few people: expected two or more with {LEAST} images each")
    return people


def _split(files: LfwFiles, names: tuple[str, ...], numbers: dict[str, int]) -> Split:
    return Split(files.faces(names).stacked(), labels_of(names, numbers)[0])
