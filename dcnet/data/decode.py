"""Image files from untrusted sources, decoded to RGB images and tensors."""

import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from PIL import ExifTags, Image, UnidentifiedImageError
from torch import Tensor

from dcnet.checks import check_whole
from dcnet.environment import available_cores
from dcnet.files import open_regular, reason_of

# Raster formats only: for some others Pillow starts programs, such as Ghostscript for EPS.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
# The largest number of pixels of an image; decoding them takes up to 1.5 GB.
MAX_PIXELS = 100_000_000
# TIFF tags with the width and height of tiles; a tile is decoded as a whole, even if the image is small.
TILE_TAGS = (322, 323)
# Warning filters are global to the process, while several threads open images.
_WARNINGS = threading.Lock()
# EXIF orientations other than 1, upright.
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def open_image(path: Path, mode: str = "RGB", small: bool = False) -> Image.Image:
    """The image of a file in a Pillow mode: upright, at full size, transparent parts on black.

    Raises an OSError if the file cannot be opened, and a one-sentence ValueError for anything wrong with its content.
    With `small`, a JPEG is decoded at an eighth of its side: the whole file is read in a fifth of the time.
    """
    with open_regular(path) as file:
        try:
            with _opened(file) as image:
                _check_size(image)
                if small:
                    image.draft(None, (1, 1))
                return _flatten(_to_bytes(_upright(image))).convert(mode)
        except UnidentifiedImageError:
            raise ValueError(f"it is not a valid image in one of the formats {', '.join(FORMATS)}") from None
        except Exception as error:
            # Depending on the format, damaged files raise any kind of error.
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(reason) from error


@contextmanager
def _opened(file: BinaryIO) -> Iterator[Image.Image]:
    """The image of an open file, without Pillow's size warning, which `_check_size` replaces."""
    with _WARNINGS, warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        image = Image.open(file, formats=FORMATS)
    with image:
        yield image


def _check_size(image: Image.Image) -> None:
    """Rejects images with too many pixels before decoding; a JPEG may be decoded at half size instead."""
    width, height = image.size
    if width * height > MAX_PIXELS:
        # No effect on other formats.
        image.draft(None, (width // 2, height // 2))
    if image.size[0] * image.size[1] > MAX_PIXELS:
        raise ValueError(f"it has {width} x {height} pixels, and {MAX_PIXELS:,} is the limit: give a smaller one")
    tags = getattr(image, "tag_v2", {})
    across, down = (tags.get(tag, 1) for tag in TILE_TAGS)
    if across * down > MAX_PIXELS:
        raise ValueError(f"it has tiles of {across} x {down} pixels, and {MAX_PIXELS:,} is the limit")


def _upright(image: Image.Image) -> Image.Image:
    """The image rotated by its EXIF orientation.

    `ImageOps.exif_transpose` copies upright images, and fails on damaged EXIF data.
    """
    # Load before EXIF is read: for some formats Pillow rotates while loading, and then removes the tag.
    image.load()
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:
        # Do not reject an image because of damaged EXIF data.
        return image
    turn = TURNS.get(orientation) if isinstance(orientation, int) else None
    return image if turn is None else image.transpose(turn)


def _to_bytes(image: Image.Image) -> Image.Image:
    """The image with 8 bits per channel; Pillow would clip 16 bits at 255.

    Floating-point pixels are rejected, since their range is unknown: Pillow would make pixels from 0 to 1 black.
    """
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers: expected 8 or 16 bits")
    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.asarray(image).clip(0, 65535) // 257).astype(np.uint8))


def _flatten(image: Image.Image) -> Image.Image:
    """The image on black: dropping alpha would reveal the hidden colors of transparent pixels."""
    if not image.has_transparency_data:
        return image
    page = Image.new("RGBA", image.size, "black")
    return Image.alpha_composite(page, image if image.mode == "RGBA" else image.convert("RGBA"))


def read_rgb(path: Path, small: bool = False) -> Image.Image:
    """The image of a file in RGB; errors name the file."""
    try:
        return open_image(path, small=small)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as an image: {reason_of(error)}; replace or delete it") from error


def resize_square(image: Image.Image, side: int) -> Image.Image:
    """The image stretched to a square of that side."""
    return image if image.size == (side, side) else image.resize((side, side), Image.Resampling.BILINEAR)


def center_crop(image: Image.Image, side: int) -> Image.Image:
    """The central square of an image that is at least that large."""
    left, top = ((length - side) // 2 for length in image.size)
    return image.crop((left, top, left + side, top + side))


@dataclass(frozen=True)
class ImageFiles:
    """Images uint8 [3, size, size] in RGB by index; each access reads the file. Faces are not aligned.

    Args:
        root: the folder of the files.
        names: the names of the files, relative to the root.
        size: the side that images are resized to.
        crop: side in pixels of the central square taken first; None for the whole image.
    """

    root: Path
    names: tuple[str, ...]
    size: int
    crop: int | None = None

    def __post_init__(self) -> None:
        check_whole("size", self.size, 1)
        if self.crop is not None:
            check_whole("crop", self.crop, 1)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Tensor:
        path = self.root / self.names[index]
        pixels = np.array(resize_square(self._cropped(path, read_rgb(path)), self.size))
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()

    def batches(self, size: int = 256) -> Iterator[Tensor]:
        """All images in order, uint8 [B, 3, size, size]."""
        check_whole("size", size, 1)
        for begin in range(0, len(self), size):
            yield torch.stack([self[index] for index in range(begin, min(begin + size, len(self)))])

    def stack(self) -> Tensor:
        """All images in order, uint8 [N, 3, size, size], read by one thread per core: Pillow releases the GIL."""
        result = torch.empty(len(self), 3, self.size, self.size, dtype=torch.uint8)
        with ThreadPoolExecutor(available_cores()) as threads:
            for at, image in enumerate(threads.map(self.__getitem__, range(len(self)))):
                result[at] = image
        return result

    def _cropped(self, path: Path, image: Image.Image) -> Image.Image:
        if self.crop is None:
            return image
        width, height = image.size
        if self.crop > min(width, height):
            raise ValueError(
                f"{path} has {width} x {height} pixels: expected at least {self.crop} x {self.crop}; an image that is "
                "already cropped must not be cropped again"
            )
        return center_crop(image, self.crop)
