"""Image files, decoded by worker processes while the device is busy with the batch before."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data
from PIL import Image
from torch import Tensor

from dcnet.data.image import seen_image
from dcnet.data.order import mixed

# Epoch and index of an image; no epoch for images of the test, to which nothing happens at random.
Key = tuple[int | None, int]
RESIZED, CROPPED = 256, 224


@dataclass(frozen=True)
class Files:
    """Image files below a folder, and their labels int64 [N].

    The names are bytes in one array, which worker processes share: each object of its own would be copied to all of
    them as soon as they look at it.
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

    As in the paper an image is resized to 256 x 256 whatever its shape, and 224 x 224 of it are taken: to train on from
    anywhere and, with `flip`, in half of the cases mirrored, for the test from the centre. For other sizes than 224
    both scale.
    """

    def __init__(self, files: Files, size: int, seed: int, flip: bool = True):
        if size < 1:
            raise ValueError(f"the side of images must be at least 1, not {size}")
        self.files, self.size, self.seed, self.flip = files, size, seed, flip
        self.resized = round(size * RESIZED / CROPPED)

    def __getitems__(self, keys: list[Key]) -> tuple[Tensor, Tensor] | str:
        try:
            images = [self._image(epoch, index) for epoch, index in keys]
        except ValueError as error:
            # An error of a worker would arrive with its traceback in the message; a sentence arrives as it is.
            return str(error)
        return torch.stack(images), self.files.labels[[index for _, index in keys]]

    def _image(self, epoch: int | None, index: int) -> Tensor:
        top, left, flip = self._place(epoch, index)
        image = read_image(self.files.path(index), self.resized).crop((left, top, left + self.size, top + self.size))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        return pixels.flip(2) if flip else pixels

    def _place(self, epoch: int | None, index: int) -> tuple[int, int, bool]:
        spare = self.resized - self.size
        if epoch is None:
            return spare // 2, spare // 2, False
        rest, flip = divmod(mixed(self.seed, epoch, index), 2)
        rest, top = divmod(rest, spare + 1)
        return top, rest % (spare + 1), self.flip and bool(flip)


def read_image(path: Path, side: int) -> Image.Image:
    """The image of a file in red, green and blue, as a square of that side."""
    return read_rgb(path).resize((side, side), Image.Resampling.BILINEAR)


def read_rgb(path: Path, small: bool = False) -> Image.Image:
    """The image of a file in red, green and blue, upright and as large as it is."""
    try:
        return seen_image(path, small=small)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path} cannot be read as an image: {reason}; replace or delete it") from error


class Loader:
    """Batches of images float32 [B, 3, size, size] in [0, 1] and labels, in the order of their keys."""

    def __init__(self, images: Images, keys: Iterable[list[Key]], workers: int, device: torch.device | str):
        if workers < 0:
            raise ValueError(f"workers must be at least 0, not {workers}")
        self.device = torch.device(device)
        # Its own generator, since a loader without one takes a number of torch's, which resuming would have to repeat.
        self._batches: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
            images,
            batch_sampler=keys,
            num_workers=workers,
            collate_fn=_as_it_is,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),
            worker_init_fn=_leave_signals_to_others,
        )

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Generator[tuple[Tensor, Tensor], None, None]:
        for batch in self._batches:
            if isinstance(batch, str):
                raise ValueError(batch)
            # Moved as bytes, which are a quarter of the floats.
            images, labels = (part.to(self.device, non_blocking=True) for part in batch)
            yield images.float() / 255, labels


def _leave_signals_to_others(worker: int) -> None:
    """Ctrl-C and the end of a queue's time reach all processes, and the one that trains needs its workers to save.

    A SIGTERM of that process itself ends the worker: Python sends it when it exits, and then waits for the worker.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is None or not hasattr(signal, "sigwaitinfo"):
        return  # torch's own handler ends the worker.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with, args=(parent.pid,), daemon=True).start()


def _end_with(parent: int | None) -> None:
    """Waits for a SIGTERM of the parent, and ends this process; those of others are left out."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    # Quietly, and not with an error, which the parent would report while it exits.
    os._exit(0)


def _as_it_is(batch: Any) -> Any:
    return batch
