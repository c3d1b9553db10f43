"""One image file as networks see it, the same in training, in tests and in prediction."""

import struct
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image

# What Pillow raises where a file is no image, or half of one.
UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)
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


def seen_image(path: Path, mode: str = "RGB") -> Image.Image:
    """The image of a file in a mode of Pillow: upright, with black behind what is transparent, as large as it is.

    Raises one of `UNREADABLE` where there is none.
    """
    with Image.open(path) as image:
        return _opaque(_in_bytes(_upright(image))).convert(mode)


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
    except (SyntaxError, ValueError, struct.error):
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
    page.alpha_composite(image.convert("RGBA"))
    return page
