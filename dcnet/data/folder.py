"""Data sets that are too large for the memory: image files, read batch by batch."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dcnet.data.decode import CROPPED, Files, Images, Key, Loader
from dcnet.data.order import seeded, share
from dcnet.environment import default_workers


@dataclass(frozen=True)
class TrainKeys:
    """The images of every batch of a process, which depend on seed and step alone: to skip steps costs nothing.

    Args:
        count: images of an epoch.
        joint: images of a batch of all processes together.
        own: images of this process in it, from `offset` on.
        start: the first step.
        steps: how many; None for no end.
    """

    count: int
    joint: int
    own: int
    offset: int
    seed: int
    start: int = 0
    steps: int | None = None

    def __iter__(self) -> Iterator[list[Key]]:
        per_epoch = self.count // self.joint
        steps = itertools.islice(itertools.count(self.start), self.steps)
        for epoch, of_epoch in itertools.groupby(steps, key=lambda step: step // per_epoch):
            order = torch.randperm(self.count, generator=seeded(self.seed, epoch))
            for step in of_epoch:
                begin = step % per_epoch * self.joint + self.offset
                yield [(epoch, index) for index in order[begin : begin + self.own].tolist()]


@dataclass(frozen=True)
class FolderDataset:
    """Image files to train on and to test with, and the names of the classes, in the order of the labels."""

    name: str
    train: Files
    val: Files
    classes: tuple[str, ...]
    channels: int = 3
    image_size: int = CROPPED

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    def steps_per_epoch(self, batch_size: int) -> int:
        """Whole batches of all processes together; the rest of an epoch is left out."""
        share(batch_size, len(self.train), 0, 1)
        return len(self.train) // batch_size

    def train_loader(
        self,
        batch_size: int,
        size: int = CROPPED,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        workers: int | None = None,
        start_step: int = 0,
        steps: int | None = None,
        device: torch.device | str = "cpu",
        flip: bool = True,
    ) -> Loader:
        """The batches of training from a step on, over all epochs; images before it are not decoded.

        Args:
            batch_size: of all processes together, of which this one takes its part.
            size: side of the images.
            seed: of order, crops and flips.
            rank: of this process.
            world: how many processes there are.
            workers: processes that decode; 0 for this one, None for one a core, up to 8.
            start_step: counted from 0 over all epochs.
            steps: batches that it gives; None for no end.
            device: where the batches are wanted.
            flip: mirrors half of the images.
        """
        own = share(batch_size, len(self.train), rank, world)
        if start_step < 0:
            raise ValueError(f"start_step must be at least 0, not {start_step}")
        keys = TrainKeys(len(self.train), batch_size, own, rank * own, seed, start_step, steps)
        return Loader(Images(self.train, size, seed, flip), keys, _number(workers), device)

    def test_loader(
        self,
        batch_size: int,
        size: int = CROPPED,
        rank: int = 0,
        world: int = 1,
        workers: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Loader:
        """Every image of the test once, shared among the processes; the last batch may be smaller."""
        own = share(batch_size, batch_size, rank, world)
        keys: list[Key] = [(None, index) for index in range(rank, len(self.val), world)]
        batches = [keys[begin : begin + own] for begin in range(0, len(keys), own)]
        return Loader(Images(self.val, size, seed=0), batches, _number(workers), device)


def _number(workers: int | None) -> int:
    return default_workers() if workers is None else workers
