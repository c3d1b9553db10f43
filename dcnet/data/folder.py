"""Data sets that are too large for the memory: image files, read batch by batch."""

import dataclasses
import itertools
import os
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from dcnet.data.decode import CROPPED, Files, Images, Key, Loader, read_rgb
from dcnet.data.order import seeded, share
from dcnet.data.provenance import Origin
from dcnet.environment import available_cores, default_workers

# Images that are looked at before the next ones are taken up.
AT_ONCE = 1000


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
    """Image files to train on and to test with, and the names of the classes, in the order of the labels.

    Attributes:
        folder: where all of them are.
        held_out: the share of images that were set apart for the test, in a folder that does not do so itself.
        skipped: images that are left out, by their paths in the folder.
    """

    name: str
    train: Files
    val: Files
    classes: tuple[str, ...]
    channels: int = 3
    image_size: int = CROPPED
    folder: Path | None = None
    held_out: float | None = None
    skipped: tuple[str, ...] = ()
    # Set by `load_dataset`; a changed copy has none.
    origin: Origin | None = field(init=False, default=None, compare=False, repr=False)

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    def bad_images(self) -> dict[str, str]:
        """The images that cannot be read, by their paths in the folder, and why; every image is decoded once."""
        paths = [files.path(index) for files in (self.train, self.val) for index in range(len(files))]
        bad: dict[str, str] = {}
        # Pillow decodes outside of the interpreter's lock; a million tasks at once would take a gigabyte.
        with ThreadPoolExecutor(available_cores()) as threads:
            for some in (paths[begin : begin + AT_ONCE] for begin in range(0, len(paths), AT_ONCE)):
                found = zip(some, threads.map(_why_unreadable, some), strict=True)
                bad |= {self._inside(path): reason for path, reason in found if reason}
        return bad

    def without(self, names: Collection[str]) -> "FolderDataset":
        """The same images but those with these paths in the folder."""
        if not names:
            return self
        left = dataclasses.replace(
            self,
            train=self._kept(self.train, set(names)),
            val=self._kept(self.val, set(names)),
            skipped=(*self.skipped, *sorted(names)),
        )
        for part, files in {"train on": left.train, "test with": left.val}.items():
            if not len(files):
                raise ValueError(f"{self.folder or self.name} has no images to {part} that can be read: expected some")
        object.__setattr__(left, "origin", self.origin)
        return left

    def _kept(self, files: Files, names: set[str]) -> Files:
        index = [index for index in range(len(files)) if self._inside(files.path(index)) not in names]
        return dataclasses.replace(files, names=files.names[np.array(index, int)], labels=files.labels[index])

    def _inside(self, path: Path) -> str:
        """The path in the folder, as text that can be written down."""
        text = str(path.relative_to(self.folder) if self.folder else path)
        return os.fsencode(text).decode(errors="backslashreplace")

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


def _why_unreadable(path: Path) -> str:
    try:
        read_rgb(path, small=True)
    except ValueError as error:
        return str(error)
    return ""


def _number(workers: int | None) -> int:
    return default_workers() if workers is None else workers
