"""Image files as the input of a trained network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL.Image import Image, Resampling
from torch import Tensor, nn

from dcnet.data.decode import center_crop, open_image
from dcnet.data.folder_dataset import CROPPED, RESIZED
from dcnet.data.lfw import FACE, ORIGINAL
from dcnet.files import reason_of
from dcnet.training.record import Record

MODES = {1: "L", 3: "RGB"}


@dataclass(frozen=True)
class ImageInput:
    """Reads image files as pixels in [0, 1], preprocessed like the test images of the run.

    Args:
        mode: "L" for gray or "RGB"; None if the network has another number of channels, which image files lack.
        channels: number of input channels of the network.
        size: side of the network input, in pixels.
        side: side to which the image is resized before its center is cropped to `size`.
        faces: crop the face at the center if the image has the original size of LFW.
    """

    mode: str | None
    channels: int
    size: int
    side: int
    faces: bool

    @classmethod
    def of(cls, record: Record) -> ImageInput:
        data, dataset = record.data, record.config["dataset"]
        size = data.image_size
        # Old records lack `image_files`; their only dataset of image files is "imagefolder".
        of_folder = data.image_files or dataset == "imagefolder"
        side = round(size * RESIZED / CROPPED) if of_folder else size
        return cls(MODES.get(data.channels), data.channels, size, side, dataset == "lfw")

    def read(self, paths: Sequence[Path], invert: bool = False) -> Tensor:
        """Reads images as pixels in [0, 1], of shape [N, C, size, size]; `invert` swaps black and white."""
        if self.mode is None:
            raise ValueError(f"the network takes {self.channels} channels, but image files have 1 or 3")
        # Resize one by one, since many photos of full size may not fit into memory.
        pixels = torch.stack([self._pixels(_open(path, self.mode)) for path in paths])
        return 1 - pixels if invert else pixels

    def _pixels(self, image: Image) -> Tensor:
        image = center_crop(image, FACE) if self.faces and image.size == ORIGINAL else image
        # Pillow antialiases when it reduces the size.
        if image.size != (self.side, self.side):
            image = image.resize((self.side, self.side), Resampling.BILINEAR)
        start = (self.side - self.size) // 2
        end = start + self.size
        channels_last = torch.from_numpy(np.array(image.crop((start, start, end, end)))).view(self.size, self.size, -1)
        return channels_last.permute(2, 0, 1).float() / 255

    def described(self) -> dict[str, Any]:
        """Describes the preprocessing for other programs, as JSON values.

        The image is converted to `mode`, resized to `resize` (width, height), and its center is cropped to `crop`.
        Pixels are scaled to `value_range`, and arranged in the order `layout`.
        """
        return {
            "mode": self.mode,
            "channel_order": list(self.mode or ""),
            "resize": [self.side, self.side],
            "interpolation": "bilinear",
            "crop": [self.size, self.size],
            "value_range": [0, 1],
            "layout": "NCHW",
        }


def _open(path: Path, mode: str) -> Image:
    try:
        return open_image(path, mode)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{str(path)!r} cannot be read as an image: {reason_of(error)}; give a file such as .png or .jpg"
        ) from None


def classify(model: nn.Module, images: Sequence[Tensor], top: int) -> list[list[tuple[int, float]]]:
    """Returns the `top` most probable classes of each image [1, C, H, W], with their probabilities."""
    if not images:
        return []
    with torch.no_grad():
        values, classes = model(torch.cat(list(images))).double().softmax(1).topk(top)
    return [list(zip(*pair, strict=True)) for pair in zip(classes.tolist(), values.tolist(), strict=True)]
