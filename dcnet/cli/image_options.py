"""Image files as a network takes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

MODES = {1: "L", 3: "RGB"}


def read_images(paths: Sequence[Path], record: dict[str, Any], invert: bool) -> Tensor:
    """Pixels from 0 to 1, [N, C, size, size], as those the run was trained on."""
    import torch

    data = record["data"]
    if data["channels"] not in MODES:
        raise ValueError(f"the run takes images of {data['channels']} channels, and image files have 1 or 3")
    mode, size = MODES[data["channels"]], data["image_size"]
    # One after the other, since photos of their full size are large.
    pixels = torch.stack([_pixels(_seen(_read(path, mode), record), size, _side(record)) for path in paths])
    return 1 - pixels if invert else pixels


def _seen(image: Image, record: dict[str, Any]) -> Image:
    """The part of an image that the network was trained on: of LFW's original files the face in the middle."""
    from dcnet.data.image_files import centre_of
    from dcnet.data.lfw_files import FACE, ORIGINAL

    return centre_of(image, FACE) if record["config"]["dataset"] == "lfw" and image.size == ORIGINAL else image


def _side(record: dict[str, Any]) -> int:
    """What an image is resized to: of a folder of images the network has seen the centre only."""
    from dcnet.data.decode import CROPPED, RESIZED

    size: int = record["data"]["image_size"]
    # Old records do not say so, and only one dataset was of files.
    of_folder = record["data"].get("image_files") or record["config"]["dataset"] == "imagefolder"
    return round(size * RESIZED / CROPPED) if of_folder else size


def _read(path: Path, mode: str) -> Image:
    """The image of a file as in training, in grey or in red, green and blue."""
    from dcnet.data.image import seen_image

    try:
        return seen_image(path, mode)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"{str(path)!r} cannot be read as an image: {reason}; give a file such as .png or .jpg"
        ) from None


def _pixels(image: Image, size: int, side: int) -> Tensor:
    """[C, size, size] from the centre of the image as a square of that side."""
    import numpy as np
    import torch
    from PIL.Image import Resampling

    # Pillow's filters widen with the reduction, so that nothing is skipped.
    resized = image if image.size == (side, side) else image.resize((side, side), Resampling.BILINEAR)
    begin = (side - size) // 2
    array = np.array(resized.crop((begin, begin, begin + size, begin + size)))
    channels_last = torch.from_numpy(array).view(size, size, -1)
    return channels_last.permute(2, 0, 1).float() / 255


def preprocessing(record: dict[str, Any]) -> dict[str, Any]:
    """What `read_images` does with an image, in words that other programs can read.

    The image is converted to `mode`, resized to `resize` (width, height), and its centre cut to `crop`; the pixels are
    then divided so that they are in `value_range`, in the order of `layout`.
    """
    size, side = record["data"]["image_size"], _side(record)
    mode = MODES.get(record["data"]["channels"])
    return {
        "mode": mode,
        "channel_order": list(mode or ""),
        "resize": [side, side],
        "interpolation": "bilinear",
        "crop": [size, size],
        "value_range": [0, 1],
        "layout": "NCHW",
    }
