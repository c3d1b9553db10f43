"""Random augmentation, and the batches of a dataset in memory as a function of seed and step."""

import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dcnet.checks import check_number, check_whole
from dcnet.data.dataset import Split

GRAY = 127.5 / 255
# The draws of brightness and contrast are whole numbers from -LEVELS to LEVELS, which a table of integers can hold.
LEVELS = 1 << 15
# Takes the place of an epoch in the seed of alternate flips.
FLIPS = -1


def _symmetric(at: Tensor, size: int) -> Tensor:
    at = at % (2 * size)
    return torch.where(at < size, at, 2 * size - 1 - at)


def _reflect(at: Tensor, size: int) -> Tensor:
    at = at % max(2 * size - 2, 1)
    return torch.where(at < size, at, 2 * size - 2 - at)


def _clamp(at: Tensor, size: int) -> Tensor:
    return at.clamp(0, size - 1)


# Maps a position outside the image to the pixel to read; for "zeros" it is masked afterwards.
PAD_MODES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "symmetric": _symmetric,
    "reflect": _reflect,
    "replicate": _clamp,
    "zeros": _clamp,
}


@dataclass(frozen=True)
class Augmentation:
    """Random changes to training images; none by default.

    Args:
        pad: pixels added on each side before a random crop of the original size.
        pad_mode: "symmetric" mirrors and repeats the edge, "reflect" mirrors without it, "replicate" repeats the edge,
            "zeros" adds black.
        flip: mirror half of the images horizontally.
        cutout: side of a gray square around a random pixel; 0 for none.
        brightness: the largest value that is added to all pixels of an image, or subtracted, with pixels in [0, 1].
        contrast: the largest relative change of the differences from the mean of each channel; 0.8 for 0.2 to 1.8 times
            the contrast.
        alternate_flips: with `flip`, mirror a random half of the images in the first epoch, the other half in the next
            one, and so on, so that two epochs have each image in both forms.
    """

    pad: int = 0
    pad_mode: str = "symmetric"
    flip: bool = False
    cutout: int = 0
    brightness: float = 0.0
    contrast: float = 0.0
    alternate_flips: bool = False

    def __post_init__(self) -> None:
        for name in ("pad", "cutout"):
            # As an int of Python, since the JSON of a config has no integers of NumPy.
            object.__setattr__(self, name, check_whole(name, getattr(self, name), 0))
        for name in ("brightness", "contrast"):
            check_number(name, getattr(self, name), least=0, most=1)
            object.__setattr__(self, name, float(getattr(self, name)))
        if self.pad_mode not in PAD_MODES:
            raise ValueError(f"pad_mode must be one of {', '.join(PAD_MODES)}, not {self.pad_mode!r}")


@dataclass(frozen=True)
class Draws:
    """The random numbers of an augmentation, per image.

    Crop shifts [N, 2], flips [N], cutout centers [N, 2], and brightness and contrast [N, 2] from -LEVELS to LEVELS.
    """

    shifts: Tensor
    flips: Tensor
    centers: Tensor
    levels: Tensor

    def to(self, device: torch.device | str) -> "Draws":
        return Draws(self.shifts.to(device), self.flips.to(device), self.centers.to(device), self.levels.to(device))


def draw(augmentation: Augmentation, count: int, image_size: tuple[int, int], generator: torch.Generator) -> Draws:
    """Random numbers for `count` images of that size, drawn on the CPU so that every device gets the same."""
    height, width = image_size
    shifts = torch.randint(0, 2 * augmentation.pad + 1, (count, 2), generator=generator)
    # Always drawn, so that crops do not change when flips or cutouts are switched on or off.
    flips = torch.randint(0, 2, (count,), generator=generator).bool()
    centers = [torch.randint(0, side, (count,), generator=generator) for side in (height, width)]
    levels = torch.randint(-LEVELS, LEVELS + 1, (count, 2), generator=generator)
    return Draws(shifts, flips, torch.stack(centers, dim=1), levels)


def augment(images: Tensor, index: Tensor, draws: Draws, augmentation: Augmentation) -> Tensor:
    """The images uint8 [N, C, H, W] at `index`, augmented, as float32 [B, C, H, W] in [0, 1].

    Shapes and operations depend on the augmentation only. Without device synchronization, a CUDA graph can capture it.
    """
    channels, height, width = images.shape[1:]
    every_channel = torch.arange(channels, device=images.device).view(1, channels, 1, 1)
    rows = torch.arange(height, device=images.device).view(1, 1, height, 1)
    columns = torch.arange(width, device=images.device).view(1, 1, 1, width)
    from_columns = torch.where(_per_image(draws.flips), width - 1 - columns, columns) if augmentation.flip else columns
    from_rows = rows + _per_image(draws.shifts[:, 0]) - augmentation.pad
    from_columns = from_columns + _per_image(draws.shifts[:, 1]) - augmentation.pad
    inside = PAD_MODES[augmentation.pad_mode]
    picked = images[_per_image(index), every_channel, inside(from_rows, height), inside(from_columns, width)]
    result = picked.float() / 255
    if augmentation.pad and augmentation.pad_mode == "zeros":
        result = result.masked_fill(_outside(from_rows, height) | _outside(from_columns, width), 0.0)
    if augmentation.brightness or augmentation.contrast:
        result = _change_light(result, draws.levels, augmentation)
    if augmentation.cutout:
        result = result.masked_fill(_cutout_mask(rows, columns, draws.centers, augmentation.cutout), GRAY)
    return result


def _outside(at: Tensor, size: int) -> Tensor:
    return (at < 0) | (at >= size)


def _per_image(values: Tensor) -> Tensor:
    """Reshapes one value per image to broadcast against [B, C, H, W]."""
    return values.view(-1, 1, 1, 1)


def _change_light(images: Tensor, levels: Tensor, augmentation: Augmentation) -> Tensor:
    """Scales the differences from the mean of each channel, adds the same value to all pixels, and clamps to [0, 1]."""
    added, scaled = (_per_image(level) / LEVELS for level in levels.unbind(1))
    mean = images.mean((2, 3), keepdim=True)
    changed = mean + (1 + augmentation.contrast * scaled) * (images - mean) + augmentation.brightness * added
    return changed.clamp(0, 1)


def _cutout_mask(rows: Tensor, columns: Tensor, centers: Tensor, side: int) -> Tensor:
    """True inside the squares; if the side is even, one pixel fewer is after the center than before it."""
    down = rows - (_per_image(centers[:, 0]) - side // 2)
    right = columns - (_per_image(centers[:, 1]) - side // 2)
    return (down >= 0) & (down < side) & (right >= 0) & (right < side)


def hash_seed(*parts: int) -> int:
    """A seed below 2^63, computed from all parts, the same on every machine."""
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def make_generator(*parts: int) -> torch.Generator:
    """A CPU generator seeded from all parts."""
    return torch.Generator().manual_seed(hash_seed(*parts))


def local_batch_size(batch_size: int, count: int, rank: int, world: int) -> int:
    """The number of images that each process gets of a batch; a batch has at most `count` images, the whole dataset."""
    if not 1 <= batch_size <= count:
        raise ValueError(f"batch_size must be from 1 to {count}, the number of images, not {batch_size}")
    check_whole("rank", rank, 0, world - 1)
    if batch_size % world:
        raise ValueError(f"batch_size must be a multiple of the number of processes, {world}, not {batch_size}")
    return batch_size // world


@dataclass(frozen=True)
class BatchDraws:
    """Images of a batch and their augmentation in one table, so that a step copies one tensor.

    Args:
        table: int64 [B, 8]: index, shift down, shift right, flip, center row, center column, and levels of brightness
            and contrast of each image.
    """

    table: Tensor

    @classmethod
    def of(cls, index: Tensor, draws: Draws) -> "BatchDraws":
        flips = draws.flips[:, None].long()
        return cls(torch.cat([index[:, None], draws.shifts, flips, draws.centers, draws.levels], dim=1))

    @property
    def index(self) -> Tensor:
        return self.table[:, 0]

    @property
    def draws(self) -> Draws:
        return Draws(self.table[:, 1:3], self.table[:, 3] != 0, self.table[:, 4:6], self.table[:, 6:8])

    def clone(self) -> "BatchDraws":
        return BatchDraws(self.table.clone())

    def copy_(self, other: "BatchDraws") -> None:
        self.table.copy_(other.table, non_blocking=True)


class Batches:
    """Training batches as a function of seed and step: resumable at any step, the same on every device.

    Args:
        split: images on the training device.
        batch_size: batch size over all processes; the incomplete batch at the end of an epoch is dropped.
        augmentation: random changes to each image.
        seed: seed of the order and the augmentation.
        rank: rank of this process, which gets its part of every batch.
        world: number of processes.
    """

    def __init__(
        self, split: Split, batch_size: int, augmentation: Augmentation, seed: int, rank: int = 0, world: int = 1
    ):
        self.batch_size = local_batch_size(batch_size, len(split), rank, world)
        self.steps_per_epoch = len(split) // batch_size
        self.split = split
        self.augmentation = augmentation
        self.seed = seed
        self._global_size = batch_size
        self._offset = rank * self.batch_size
        self._epoch: tuple[int, Tensor] | None = None

    def draws(self, step: int) -> BatchDraws:
        """Image indices and augmentation of a step, on the device of the images; steps count from 0 over all epochs."""
        check_whole("step", step, 0)
        epoch, within = divmod(step, self.steps_per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, self._draw_epoch(epoch).to(self.split.images.device))
        start = within * self._global_size + self._offset
        # Cloned, since callers may write to it while the epoch is still in use.
        return BatchDraws(self._epoch[1][start : start + self.batch_size].clone())

    def _draw_epoch(self, epoch: int) -> Tensor:
        generator = make_generator(self.seed, epoch)
        count, (height, width) = len(self.split), self.split.images.shape[2:]
        order = torch.randperm(count, generator=generator)
        draws = draw(self.augmentation, count, (height, width), generator)
        if self.augmentation.alternate_flips:
            first = torch.randint(0, 2, (count,), generator=make_generator(self.seed, FLIPS)).bool()
            draws = dataclasses.replace(draws, flips=first[order] ^ bool(epoch % 2))
        return BatchDraws.of(order, draws).table

    def images(self, draws: BatchDraws) -> tuple[Tensor, Tensor]:
        """Images of a batch as float32 in [0, 1], and their labels; a CUDA graph can capture it."""
        images = augment(self.split.images, draws.index, draws.draws, self.augmentation)
        return images, self.split.labels[draws.index]
