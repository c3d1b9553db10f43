"""Random crops, flips and cutouts of images that stay bytes on the device until they are a batch."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

GREY = 127.5 / 255


def _symmetric(at: Tensor, size: int) -> Tensor:
    at = at % (2 * size)
    return torch.where(at < size, at, 2 * size - 1 - at)


def _reflect(at: Tensor, size: int) -> Tensor:
    at = at % max(2 * size - 2, 1)
    return torch.where(at < size, at, 2 * size - 2 - at)


def _clamped(at: Tensor, size: int) -> Tensor:
    return at.clamp(0, size - 1)


# Where the pixel of a place beyond the border comes from; what is zero there is cleared afterwards.
PAD_MODES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "symmetric": _symmetric,
    "reflect": _reflect,
    "replicate": _clamped,
    "zeros": _clamped,
}


@dataclass(frozen=True)
class Augmentation:
    """What happens at random to an image before it is trained on; nothing by default.

    Args:
        pad: pixels that are added on every side, before a crop of the old size is taken anywhere.
        pad_mode: what is added: "symmetric" is the mirror image with the edge repeated, "reflect" without, "replicate"
            the edge, "zeros" black.
        flip: left and right change places in half of the images.
        cutout: side of a grey square that is laid around a random pixel; 0 for none.
    """

    pad: int = 0
    pad_mode: str = "symmetric"
    flip: bool = False
    cutout: int = 0

    def __post_init__(self) -> None:
        if self.pad < 0:
            raise ValueError(f"pad must be at least 0, not {self.pad}")
        if self.pad_mode not in PAD_MODES:
            raise ValueError(f"pad_mode must be one of {', '.join(PAD_MODES)}, not {self.pad_mode!r}")
        if self.cutout < 0:
            raise ValueError(f"cutout must be at least 0, not {self.cutout}")


@dataclass(frozen=True)
class Draws:
    """Chance of one row per image: shifts [N, 2] of the crop, flips [N], and centres [N, 2] of the cutout."""

    shifts: Tensor
    flips: Tensor
    centres: Tensor

    def __len__(self) -> int:
        return len(self.flips)

    def __getitem__(self, rows: slice) -> "Draws":
        return Draws(self.shifts[rows], self.flips[rows], self.centres[rows])

    def to(self, device: torch.device | str) -> "Draws":
        return Draws(self.shifts.to(device), self.flips.to(device), self.centres.to(device))


def draw(augmentation: Augmentation, count: int, image_size: tuple[int, int], generator: torch.Generator) -> Draws:
    """Draws for `count` images of that height and width, on the CPU, so that every device gets the same."""
    height, width = image_size
    shifts = torch.randint(0, 2 * augmentation.pad + 1, (count, 2), generator=generator)
    # Drawn whether wanted or not: the crops stay what they are where flips or cutouts come and go.
    flips = torch.randint(0, 2, (count,), generator=generator).bool()
    across = [torch.randint(0, side, (count,), generator=generator) for side in (height, width)]
    return Draws(shifts, flips, torch.stack(across, dim=1))


def augmented(images: Tensor, index: Tensor, draws: Draws, augmentation: Augmentation) -> Tensor:
    """The images uint8 [N, C, H, W] at `index`, cropped, flipped and cut out, as float32 [B, C, H, W] in [0, 1].

    Shapes and operations depend on the augmentation alone, and nothing waits for the device: a CUDA graph may hold it.
    """
    channels, height, width = images.shape[1:]
    every_channel = torch.arange(channels, device=images.device).view(1, channels, 1, 1)
    rows = torch.arange(height, device=images.device).view(1, 1, height, 1)
    columns = torch.arange(width, device=images.device).view(1, 1, 1, width)
    from_columns = torch.where(_each(draws.flips), width - 1 - columns, columns) if augmentation.flip else columns
    from_rows = rows + _each(draws.shifts[:, 0]) - augmentation.pad
    from_columns = from_columns + _each(draws.shifts[:, 1]) - augmentation.pad
    inside = PAD_MODES[augmentation.pad_mode]
    picked = images[_each(index), every_channel, inside(from_rows, height), inside(from_columns, width)]
    found = picked.float() / 255
    if augmentation.pad and augmentation.pad_mode == "zeros":
        found = found.masked_fill(_beyond(from_rows, height) | _beyond(from_columns, width), 0.0)
    if augmentation.cutout:
        found = found.masked_fill(_cut(rows, columns, draws.centres, augmentation.cutout), GREY)
    return found


def _beyond(at: Tensor, size: int) -> Tensor:
    return (at < 0) | (at >= size)


def _each(of_images: Tensor) -> Tensor:
    """One number per image, against [B, C, H, W]."""
    return of_images.view(-1, 1, 1, 1)


def _cut(rows: Tensor, columns: Tensor, centres: Tensor, side: int) -> Tensor:
    """Where the squares are; an even side reaches one pixel less beyond its centre than before it."""
    down = rows - (_each(centres[:, 0]) - side // 2)
    right = columns - (_each(centres[:, 1]) - side // 2)
    return (down >= 0) & (down < side) & (right >= 0) & (right < side)
