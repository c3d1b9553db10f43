"""Images in files, decoded when they are wanted, and folders with one person each."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dcnet.data.imagefolder import SUFFIXES
from dcnet.verification.pairs import person_of


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
        pixels = np.array(self._square(path, _read(path)))
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()

    def batches(self, size: int = 256) -> Iterator[Tensor]:
        """All images in their order, uint8 [B, 3, size, size]."""
        if size < 1:
            raise ValueError(f"a batch must have at least 1 image, not {size}")
        for begin in range(0, len(self), size):
            yield torch.stack([self[index] for index in range(begin, min(begin + size, len(self)))])

    def _square(self, path: Path, image: Image.Image) -> Image.Image:
        if self.crop is not None:
            width, height = image.size
            if self.crop > min(width, height):
                raise ValueError(
                    f"{path} has {width} x {height} pixels, and no {self.crop} x {self.crop} around its centre: "
                    "expected a larger image, since one that was cropped before must not be cropped again"
                )
            left, top = (width - self.crop) // 2, (height - self.crop) // 2
            image = image.crop((left, top, left + self.crop, top + self.crop))
        if image.size == (self.size, self.size):
            return image
        return image.resize((self.size, self.size), Image.Resampling.BILINEAR)


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
    files = sorted(entry.name for entry in os.scandir(root / person) if entry.name.lower().endswith(SUFFIXES))
    return tuple(f"{person}/{file}" for file in files)


def _read(path: Path) -> Image.Image:
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} cannot be read as an image: {reason}; replace or delete it") from error
