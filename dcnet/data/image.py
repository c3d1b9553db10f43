"""One image file as networks see it, the same in training, in tests and in prediction."""

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from dcnet.files import open_regular

# Raster formats alone, whatever a file is called: for some others Pillow starts programs, as Ghostscript for EPS.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
# Pixels that are decoded, which take up to 1.5 GB.
LARGEST = 100_000_000
# Where TIFF notes the width and height of its tiles, which are decoded whole, however small the image is.
TILES = (322, 323)
# Filters of warnings belong to the process, and images are opened by threads.
_WARNINGS = threading.Lock()
# What an image is turned by to stand upright, by the orientation that a camera notes in its file.
AS_IT_LIES = 1
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def seen_image(path: Path, mode: str = "RGB", small: bool = False) -> Image.Image:
    """The image of a file in a mode of Pillow: upright, with black behind what is transparent, as large as it is.

    An OSError if the file cannot be opened, and a ValueError in one sentence, whatever is wrong with what is in it.
    With `small`, a JPEG is decoded at an eighth of its side: all of the file is read, in a fifth of the time.
    """
    with open_regular(path) as file:
        try:
            with _opened(file) as image:
                _check_size(image)
                if small:
                    image.draft(None, (1, 1))
                return _opaque(_in_bytes(_upright(image))).convert(mode)
        except UnidentifiedImageError:
            names = ", ".join(FORMATS)
            raise ValueError(f"it is not an image, or a damaged one, in one of the formats {names}") from None
        except Exception as error:
            # Damaged files end in errors of any kind, by the format that they are in.
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(reason) from error


@contextmanager
def _opened(file: BinaryIO) -> Iterator[Image.Image]:
    """The image of an open file, without Pillow's warning about its size, which `_check_size` is for."""
    with _WARNINGS, warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        image = Image.open(file, formats=FORMATS)
    with image:
        yield image


def _check_size(image: Image.Image) -> None:
    """Refuses an image with too many pixels, before it is decoded; a JPEG is decoded at half its size, if that does."""
    width, height = image.size
    if width * height > LARGEST:
        # Does nothing for other formats.
        image.draft(None, (width // 2, height // 2))
    if image.size[0] * image.size[1] > LARGEST:
        raise ValueError(f"it has {width} x {height} pixels, and {LARGEST:,} is the limit: give a smaller one")
    tags = getattr(image, "tag_v2", {})
    across, down = (tags.get(tag, 1) for tag in TILES)
    if across * down > LARGEST:
        raise ValueError(f"it has tiles of {across} x {down} pixels, and {LARGEST:,} is the limit")


def _upright(image: Image.Image) -> Image.Image:
    """The image turned as its file says, if it says so.

    Not by `ImageOps.exif_transpose`, which copies the images that stand already, and fails for damaged notes.
    """
    # Before the notes are read, since Pillow turns some kinds of files by itself, and then strikes the note out.
    image.load()
    turn = TURNS.get(_orientation(image))
    return image if turn is None else image.transpose(turn)


def _orientation(image: Image.Image) -> int:
    """As noted in the file; damaged notes are no reason to do without the image, which is then left as it lies."""
    try:
        noted = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:
        return AS_IT_LIES
    return noted if isinstance(noted, int) else AS_IT_LIES


def _in_bytes(image: Image.Image) -> Image.Image:
    """The image with bytes for pixels, also where they have 16 bits, which Pillow would cut off at 255.

    Of pixels that are fractions nobody knows the largest: from 0 to 1, Pillow would make them black.
    """
    if image.mode == "F":
        raise ValueError("its pixels are fractions, and not of 8 or 16 bits")
    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.asarray(image).clip(0, 65535) // 257).astype(np.uint8))


def _opaque(image: Image.Image) -> Image.Image:
    """The image on black: to drop what is transparent would show the colours below it, which nobody has seen."""
    if not image.has_transparency_data:
        return image
    page = Image.new("RGBA", image.size, "black")
    return Image.alpha_composite(page, image if image.mode == "RGBA" else image.convert("RGBA"))
