"""Datasets too large for memory: image files, decoded batch by batch in worker processes."""

import dataclasses
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Collection, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data
from torch import Tensor

from dcnet.checks import check_whole
from dcnet.data.batches import hash_seed, local_batch_size, make_generator
from dcnet.data.dataset import FINGERPRINT_DIGITS, Origin, hash_classes
from dcnet.data.decode import read_rgb, resize_square
from dcnet.environment import available_cores, default_workers

# Epoch and index of an image; the epoch is None for test images, which are not augmented.
Key = tuple[int | None, int]
RESIZED: int = 256
CROPPED: int = 224
# Images are checked in chunks of this many, since a million queued tasks would take a gigabyte.
CHECKED_AT_ONCE = 1000


@dataclass(frozen=True)
class Files:
    """Image files below a folder, and their labels int64 [N].

    The names are bytes in one array, which worker processes share; separate objects would be copied to each of them.
    """

    root: Path
    names: np.ndarray[Any, np.dtype[np.bytes_]]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> Path:
        return self.root / os.fsdecode(bytes(self.names[index]))


class Images(torch.utils.data.Dataset[Any]):
    """Images uint8 [B, 3, size, size] and labels by their keys.

    As in the paper, an image of any aspect ratio is resized to 256 x 256 and cropped to 224 x 224: randomly and,
    with `flip`, mirrored in half of the cases for training, at the center for the test. Other sizes scale both.
    """

    def __init__(self, files: Files, size: int, seed: int, flip: bool = True):
        check_whole("size", size, 1)
        self.files, self.size, self.seed, self.flip = files, size, seed, flip
        self.resized = round(size * RESIZED / CROPPED)

    def __getitems__(self, keys: list[Key]) -> tuple[Tensor, Tensor] | str:
        try:
            images = [self._image(epoch, index) for epoch, index in keys]
        except ValueError as error:
            # As a string: an exception raised in a worker arrives with its traceback in the message.
            return str(error)
        return torch.stack(images), self.files.labels[[index for _, index in keys]]

    def _image(self, epoch: int | None, index: int) -> Tensor:
        top, left, flip = self._place(epoch, index)
        image = resize_square(read_rgb(self.files.path(index)), self.resized)
        pixels = torch.from_numpy(np.array(image.crop((left, top, left + self.size, top + self.size))))
        return pixels.permute(2, 0, 1).flip(2) if flip else pixels.permute(2, 0, 1)

    def _place(self, epoch: int | None, index: int) -> tuple[int, int, bool]:
        spare = self.resized - self.size
        if epoch is None:
            return spare // 2, spare // 2, False
        rest, flip = divmod(hash_seed(self.seed, epoch, index), 2)
        rest, top = divmod(rest, spare + 1)
        return top, rest % (spare + 1), self.flip and bool(flip)


@dataclass(frozen=True)
class TrainKeys:
    """The images of every batch of a process, as a function of seed and step: skipping steps costs nothing.

    Args:
        count: images per epoch.
        global_size: images per batch over all processes.
        own: images of this process per batch, starting at `offset`.
        start: the first step.
        steps: number of steps; None for no limit.
    """

    count: int
    global_size: int
    own: int
    offset: int
    seed: int
    start: int = 0
    steps: int | None = None

    def __iter__(self) -> Iterator[list[Key]]:
        per_epoch = self.count // self.global_size
        steps = itertools.islice(itertools.count(self.start), self.steps)
        for epoch, of_epoch in itertools.groupby(steps, key=lambda step: step // per_epoch):
            order = torch.randperm(self.count, generator=make_generator(self.seed, epoch))
            for step in of_epoch:
                begin = step % per_epoch * self.global_size + self.offset
                yield [(epoch, index) for index in order[begin : begin + self.own].tolist()]


class Loader:
    """Batches of images float32 [B, 3, size, size] in [0, 1] and labels, in the order of their keys.

    `workers` is the number of decoding processes: 0 to decode in this process, None for one per core, at most 8.
    """

    def __init__(self, images: Images, keys: Iterable[list[Key]], workers: int | None, device: torch.device | str):
        workers = default_workers() if workers is None else check_whole("workers", workers, 0)
        self.device = torch.device(device)
        self._batches: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
            images,
            batch_sampler=keys,
            num_workers=workers,
            collate_fn=_unchanged,
            pin_memory=self.device.type == "cuda",
            # Without a generator, a loader draws from torch's global one, which a resumed run would have to repeat.
            generator=torch.Generator(),
            worker_init_fn=_ignore_signals,
        )

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Generator[tuple[Tensor, Tensor], None, None]:
        for batch in self._batches:
            if isinstance(batch, str):
                raise ValueError(batch)
            # Moved as bytes, a quarter of the size of floats.
            images, labels = (part.to(self.device, non_blocking=True) for part in batch)
            yield images.float() / 255, labels


def _unchanged(batch: Any) -> Any:
    return batch


def _ignore_signals(worker: int) -> None:
    """Ignores Ctrl-C and the SIGTERM of a job queue, since the training process needs its workers to save.

    A SIGTERM from the training process itself ends the worker: Python sends it at exit, and then waits.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is None or not hasattr(signal, "sigwaitinfo"):
        return  # torch's handler ends the worker.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_exit_with, args=(parent.pid,), daemon=True).start()


def _exit_with(parent: int | None) -> None:
    """Waits for a SIGTERM from the parent, and ends this process."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    # With status 0, since otherwise the parent would report an error as it exits.
    os._exit(0)


@dataclass(frozen=True)
class FolderDataset:
    """Image files for training and test, and the class names in the order of the labels.

    Attributes:
        folder: the folder of all files.
        held_out: fraction of images held out for the test, if the folder has no test part.
        skipped: images left out, by their paths in the folder.
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
    # Set by `load_dataset`; a modified copy has none.
    origin: Origin | None = field(init=False, default=None, compare=False, repr=False)

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    def fingerprint(self) -> str:
        """A hash of class names, file names and file sizes."""
        digest = hash_classes(self.classes)
        for part in (self.train, self.val):
            root = os.fsencode(part.root)
            lines = (b"%s %d\n" % (name, _file_size(os.path.join(root, name))) for name in map(bytes, part.names))
            digest.update(b"%d files\n" % len(part) + b"".join(lines))
        return str(digest.hexdigest()[:FINGERPRINT_DIGITS])

    def unreadable_images(self) -> dict[str, str]:
        """The images that cannot be decoded: their paths in the folder, and why. Decodes every image once."""
        paths = [files.path(index) for files in (self.train, self.val) for index in range(len(files))]
        unreadable: dict[str, str] = {}
        # Pillow releases the GIL while it decodes.
        with ThreadPoolExecutor(available_cores()) as threads:
            for begin in range(0, len(paths), CHECKED_AT_ONCE):
                some = paths[begin : begin + CHECKED_AT_ONCE]
                problems = zip(some, threads.map(_decoding_problem, some), strict=True)
                unreadable |= {self._relative(path): problem for path, problem in problems if problem}
        return unreadable

    def without(self, names: Collection[str]) -> "FolderDataset":
        """The dataset without the images at these paths in the folder."""
        if not names:
            return self
        left = dataclasses.replace(
            self,
            train=self._keep(self.train, set(names)),
            val=self._keep(self.val, set(names)),
            skipped=(*self.skipped, *sorted(names)),
        )
        for part, files in {"training": left.train, "test": left.val}.items():
            if not len(files):
                raise ValueError(f"{self.folder or self.name} has no readable images for {part}: expected one or more")
        object.__setattr__(left, "origin", self.origin)
        return left

    def _keep(self, files: Files, left_out: set[str]) -> Files:
        index = [index for index in range(len(files)) if self._relative(files.path(index)) not in left_out]
        return dataclasses.replace(files, names=files.names[np.array(index, int)], labels=files.labels[index])

    def _relative(self, path: Path) -> str:
        """The path in the folder, as valid UTF-8."""
        text = str(path.relative_to(self.folder) if self.folder else path)
        return os.fsencode(text).decode(errors="backslashreplace")

    def steps_per_epoch(self, batch_size: int) -> int:
        """The number of complete batches of an epoch, over all processes; the rest is dropped."""
        local_batch_size(batch_size, len(self.train), 0, 1)
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
        """Training batches from `start_step` on, over all epochs; images of earlier steps are not decoded.

        Args:
            batch_size: batch size over all processes; this process gets its part.
            size: side of the images.
            seed: seed of order, crops and flips.
            rank: rank of this process.
            world: number of processes.
            workers: number of decoding processes; 0 to decode in this process, None for one per core, at most 8.
            start_step: the first step, counted from 0 over all epochs.
            steps: number of batches; None for no limit.
            device: device of the batches.
            flip: mirror half of the images.
        """
        own = local_batch_size(batch_size, len(self.train), rank, world)
        check_whole("start_step", start_step, 0)
        keys = TrainKeys(len(self.train), batch_size, own, rank * own, seed, start_step, steps)
        return Loader(Images(self.train, size, seed, flip), keys, workers, device)

    def test_loader(
        self,
        batch_size: int,
        size: int = CROPPED,
        rank: int = 0,
        world: int = 1,
        workers: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Loader:
        """Every test image once, divided among the processes; the last batch may be smaller."""
        own = local_batch_size(batch_size, batch_size, rank, world)
        keys: list[Key] = [(None, index) for index in range(rank, len(self.val), world)]
        batches = [keys[begin : begin + own] for begin in range(0, len(keys), own)]
        return Loader(Images(self.val, size, seed=0), batches, workers, device)


def _file_size(path: bytes) -> int:
    """The size of a file; -1 if it no longer exists, which is reported when it is read."""
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


def _decoding_problem(path: Path) -> str:
    try:
        read_rgb(path, small=True)
    except ValueError as error:
        return str(error)
    return ""
