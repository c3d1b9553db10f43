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
    """Converts image files to pixels in [0, 1], like those that the network was trained on.

    Args:
        mode: "L" for gray or "RGB"; None for other numbers of channels, which image files do not have.
        channels: of the network.
        size: side of the input.
        side: the image is resized to this side first, and its center is cropped.
        faces: crop the face in the middle of an original file of LFW.
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
        # Old records lack this value, and only one dataset had files.
        of_folder = data.image_files or dataset == "imagefolder"
        side = round(size * RESIZED / CROPPED) if of_folder else size
        return cls(MODES.get(data.channels), data.channels, size, side, dataset == "lfw")

    def read(self, paths: Sequence[Path], invert: bool = False) -> Tensor:
        """Pixels in [0, 1], [N, C, size, size]."""
        if self.mode is None:
            raise ValueError(f"the run takes images of {self.channels} channels, and image files have 1 or 3")
        # One by one, since photos of full size are large.
        pixels = torch.stack([self._pixels(_open(path, self.mode)) for path in paths])
        return 1 - pixels if invert else pixels

    def _pixels(self, image: Image) -> Tensor:
        image = center_crop(image, FACE) if self.faces and image.size == ORIGINAL else image
        # Pillow's filters widen with the reduction, so that no pixel is skipped.
        if image.size != (self.side, self.side):
            image = image.resize((self.side, self.side), Resampling.BILINEAR)
        start = (self.side - self.size) // 2
        end = start + self.size
        channels_last = torch.from_numpy(np.array(image.crop((start, start, end, end)))).view(self.size, self.size, -1)
        return channels_last.permute(2, 0, 1).float() / 255

    def described(self) -> dict[str, Any]:
        """The preprocessing for other programs.

        The image is converted to `mode`, resized to `resize` (width, height), and its center is cropped to `crop`; the
        pixels are then divided so that they are in `value_range`, in the order of `layout`.
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
    """For each image [1, C, H, W], the most probable classes and their probabilities."""
    if not images:
        return []
    with torch.no_grad():
        values, classes = model(torch.cat(list(images))).double().softmax(1).topk(top)
    return [list(zip(*pair, strict=True)) for pair in zip(classes.tolist(), values.tolist(), strict=True)]
