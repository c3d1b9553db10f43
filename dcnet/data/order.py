"""Which images are in which batch, and what chance does to them."""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from dcnet.data.augment import Augmentation, Draws, augmented, draw
from dcnet.data.dataset import Split


def mixed(*parts: int) -> int:
    """A number below 2^63 that depends on all of the parts, and is the same everywhere."""
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seeded(*parts: int) -> torch.Generator:
    """A generator on the CPU whose numbers depend on all of the parts."""
    return torch.Generator().manual_seed(mixed(*parts))


def share(batch_size: int, count: int, rank: int, world: int) -> int:
    """The images that each of the processes takes from a joint batch of `count` images at most."""
    if not 1 <= batch_size <= count:
        raise ValueError(f"a batch must have from 1 to {count} images, as many as there are, not {batch_size}")
    if not 0 <= rank < world:
        raise ValueError(f"rank must be from 0 to {world - 1}, not {rank}")
    if batch_size % world:
        raise ValueError(f"a batch of {batch_size} images cannot be shared by {world} processes: it must be a multiple")
    return batch_size // world


@dataclass(frozen=True)
class BatchDraws:
    """Which images a batch has and what chance does to them, in one table: a step then copies one tensor.

    Args:
        table: int64 [B, 6], with index, shift down, shift right, flip, centre down and centre right of each image.
    """

    table: Tensor

    @classmethod
    def of(cls, index: Tensor, draws: Draws) -> "BatchDraws":
        return cls(torch.cat([index[:, None], draws.shifts, draws.flips[:, None].long(), draws.centres], dim=1))

    @property
    def index(self) -> Tensor:
        return self.table[:, 0]

    @property
    def draws(self) -> Draws:
        return Draws(self.table[:, 1:3], self.table[:, 3] != 0, self.table[:, 4:6])

    def tensors(self) -> list[Tensor]:
        return [self.table]

    def clone(self) -> "BatchDraws":
        return BatchDraws(self.table.clone())

    def copy_(self, other: "BatchDraws") -> None:
        """Takes over what the other has, in the same memory."""
        self.table.copy_(other.table, non_blocking=True)


class Batches:
    """The batches of all of training as a function of seed and step: resumable anywhere, the same on every device.

    Args:
        split: images on the device that they are wanted on.
        batch_size: of all processes together; what is left of an epoch after the last whole batch is left out.
        augmentation: what happens at random to an image.
        seed: of order and augmentation.
        rank: of this process, which takes its part of every joint batch.
        world: how many processes there are.
    """

    def __init__(
        self, split: Split, batch_size: int, augmentation: Augmentation, seed: int, rank: int = 0, world: int = 1
    ):
        self.batch_size = share(batch_size, len(split), rank, world)
        self.steps_per_epoch = len(split) // batch_size
        self.split = split
        self.augmentation = augmentation
        self.seed = seed
        self._joint = batch_size
        self._offset = rank * self.batch_size
        self._epoch: tuple[int, Tensor] | None = None

    def draws(self, step: int) -> BatchDraws:
        """What the batch of a step, counted from 0 over all epochs, is made of, on the device of the images."""
        if step < 0:
            raise ValueError(f"step must be at least 0, not {step}")
        epoch, within = divmod(step, self.steps_per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, self._draw_epoch(epoch).to(self.split.images.device))
        start = within * self._joint + self._offset
        # Cloned, since whoever gets it may write to it, and the epoch is needed again.
        return BatchDraws(self._epoch[1][start : start + self.batch_size].clone())

    def _draw_epoch(self, epoch: int) -> Tensor:
        generator = seeded(self.seed, epoch)
        count, (height, width) = len(self.split), self.split.images.shape[2:]
        order = torch.randperm(count, generator=generator)
        return BatchDraws.of(order, draw(self.augmentation, count, (height, width), generator)).table

    def images(self, draws: BatchDraws) -> tuple[Tensor, Tensor]:
        """The images of a batch as float32 in [0, 1], and their labels; a CUDA graph may hold it."""
        found = augmented(self.split.images, draws.index, draws.draws, self.augmentation)
        return found, self.split.labels[draws.index]
