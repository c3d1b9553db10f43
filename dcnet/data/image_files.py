"""Images in files, decoded when they are wanted, and folders with one person each."""

import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dcnet.data.decode import read_rgb
from dcnet.data.imagefolder import image_names
from dcnet.environment import available_cores


@dataclass(frozen=True)
class ImageFiles:
    """Images uint8 [3, size, size], red first, by index; a file is read whenever its image is asked for.

    Nothing is aligned: faces stay where whoever made the files put them.

    Args:
        root: the folder that the names begin in.
        names: of the files.
        size: side that the images are resized to.
        crop: side in pixels of the square around the centre of a file that is taken before; None for all of it.
    """

    root: Path
    names: tuple[str, ...]
    size: int
    crop: int | None = None

    def __post_init__(self) -> None:
        for name, side in (("size", self.size), ("crop", self.crop)):
            if side is not None and side < 1:
                raise ValueError(f"{name} must be at least 1, not {side}")

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Tensor:
        path = self.root / self.names[index]
        pixels = np.array(self._square(path, read_rgb(path)))
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()

    def batches(self, size: int = 256) -> Iterator[Tensor]:
        """All images in their order, uint8 [B, 3, size, size]."""
        if size < 1:
            raise ValueError(f"a batch must have at least 1 image, not {size}")
        for begin in range(0, len(self), size):
            yield torch.stack([self[index] for index in range(begin, min(begin + size, len(self)))])

    def stacked(self) -> Tensor:
        """All images in their order, uint8 [N, 3, size, size].

        Read by as many threads as there are cores, which do not wait for each other: Pillow decodes outside of the
        interpreter's lock.
        """
        found = torch.empty(len(self), 3, self.size, self.size, dtype=torch.uint8)
        with ThreadPoolExecutor(available_cores()) as threads:
            for at, image in enumerate(threads.map(self.__getitem__, range(len(self)))):
                found[at] = image
        return found

    def _square(self, path: Path, image: Image.Image) -> Image.Image:
        if self.crop is not None:
            width, height = image.size
            if self.crop > min(width, height):
                raise ValueError(
                    f"{path} has {width} x {height} pixels, and no {self.crop} x {self.crop} around its centre: "
                    "expected a larger image, since one that was cropped before must not be cropped again"
                )
            image = centre_of(image, self.crop)
        if image.size == (self.size, self.size):
            return image
        return image.resize((self.size, self.size), Image.Resampling.BILINEAR)


def centre_of(image: Image.Image, side: int) -> Image.Image:
    """The square of that side around the centre of an image that is no smaller."""
    left, top = ((length - side) // 2 for length in image.size)
    return image.crop((left, top, left + side, top + side))


def person_of(name: str) -> str:
    """Who an image shows: the folder that it is in."""
    person = PurePosixPath(name).parent.name
    if not person:
        raise ValueError(f"the image {name!r} is in no folder, which would name its person: expected person/{name}")
    return person


def people_folders(root: Path | str) -> dict[str, tuple[str, ...]]:
    """The images of each person, person/image, from a folder with a folder for each; sorted; none without images."""
    root = Path(root)
    if not root.is_dir():
        raise ValueError(f"there is no folder {str(root)!r}: expected one with a folder of images for each person")
    people = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    found = {person: _images(root, person) for person in people}
    found = {person: images for person, images in found.items() if images}
    if not found:
        raise ValueError(f"{root} has no images: expected a folder of images for each person, such as Ada/Ada_0001.jpg")
    return found


def labels_of(names: Iterable[str], people: Mapping[str, int] | None = None) -> tuple[Tensor, dict[str, int]]:
    """The person of each image as a number int64 [N], by their folders, and the number of each person.

    Args:
        names: files, person/image.
        people: numbers from before, so that a gallery and its probes have the same; others get numbers after these.
    """
    numbers = dict(people or {})
    following = max(numbers.values(), default=-1) + 1
    found = []
    for name in names:
        person = person_of(name)
        if person not in numbers:
            numbers[person] = following
            following += 1
        found.append(numbers[person])
    return torch.tensor(found, dtype=torch.int64), numbers


def _images(root: Path, person: str) -> tuple[str, ...]:
    return tuple(f"{person}/{file}" for file in image_names(root / person))
