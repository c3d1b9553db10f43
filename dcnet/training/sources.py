"""Sources of batches: a dataset in device memory, or a folder of images that worker processes read."""

from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from dcnet.checks import check_whole
from dcnet.data import BatchDraws, Batches, Dataset, FolderDataset
from dcnet.training.config import RunConfig
from dcnet.training.evaluation import batches_of
from dcnet.training.schedules import ImageSizes
from dcnet.training.step import Captured

TrainStep = Callable[[Tensor, Tensor], None]


class Resident:
    """Holds all images as bytes on the device, and augments them there."""

    def __init__(self, dataset: Dataset, config: RunConfig, device: torch.device, share: tuple[int, int], graph: bool):
        if config.image_size not in (None, dataset.image_size):
            raise ValueError(
                f"image_size={config.image_size} does not match {dataset.name}, whose images have the size "
                f"{dataset.image_size}: omit it"
            )
        check_whole("cutout", config.augmentation.cutout, 0, dataset.image_size)
        train = dataset.train
        if config.train_images is not None:
            train = train.subset(config.train_images, dataset.num_classes, config.seed)
        rank, world = share
        self.batches = Batches(
            train.to(device), config.batch_size, config.augmentation, config.seed, rank=rank, world=world
        )
        self.steps_per_epoch = self.batches.steps_per_epoch
        self.test_batches = batches_of(dataset.test.to(device))
        self.graph = graph
        self.total_steps = config.steps or (config.epochs or 0) * self.steps_per_epoch
        self.sizes = ImageSizes.parse(config.progressive_sizes)
        for size, _ in self.sizes.stages:
            check_whole("a progressive size", size, 1, dataset.image_size)
        # One graph per image size, None for the full size.
        self._captured: dict[int | None, Captured] = {}

    @property
    def size_changes(self) -> list[int]:
        """The steps at which the size of the images changes."""
        return self.sizes.changes(self.total_steps)

    def train(self, step: int, train_step: TrainStep) -> None:
        """Calls `train_step` with the batch of a step, counted from 0; steps must be in order."""
        table, size = self.batches.draws(step).table, self.sizes.at(step, self.total_steps)
        if not self.graph:
            train_step(*self._batch(table, size))
            return
        if size not in self._captured:
            self._captured[size] = Captured(lambda given: train_step(*self._batch(given, size)))
        self._captured[size](table)

    def images(self, step: int, full_size: bool = False) -> Tensor:
        """Returns the images of a step again, at their size in that step or at the full size."""
        size = None if full_size else self.sizes.at(step, self.total_steps)
        return self._batch(self.batches.draws(step).table, size)[0]

    def test(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Returns the batches of the test set."""
        return self.test_batches

    def close(self) -> None:
        """Does nothing; there are no worker processes."""

    def _batch(self, table: Tensor, size: int | None) -> tuple[Tensor, Tensor]:
        images, labels = self.batches.images(BatchDraws(table))
        if size is not None:
            images = F.interpolate(images, (size, size), mode="bilinear", antialias=True)
        # channels_last is fastest for cuDNN; on a CPU the copy costs more than it saves.
        return images.contiguous(memory_format=torch.channels_last) if images.is_cuda else images, labels


class Streamed:
    """Reads images from files with worker processes; has the interface of `Resident`."""

    # The size of the images never changes.
    size_changes: tuple[int, ...] = ()

    def __init__(
        self, dataset: FolderDataset, config: RunConfig, device: torch.device, share: tuple[int, int], workers: int
    ):
        augmentation = config.augmentation
        resident = ("pad", "cutout", "brightness", "contrast", "alternate_flips")
        unused = {"train_images": config.train_images, "progressive_sizes": config.progressive_sizes}
        unused |= {name: getattr(augmentation, name) for name in resident}
        for name, value in unused.items():
            if value:
                raise ValueError(f"{name}={value} does not apply to {dataset.name}, a folder of images: omit it")
        self.dataset, self.device, self.batch_size = dataset, device, config.batch_size
        rank, world = share
        self.options: dict[str, Any] = {"size": config.image_size or 224, "workers": workers}
        self.training: dict[str, Any] = {"seed": config.seed, "flip": augmentation.flip, "rank": rank, "world": world}
        self.steps_per_epoch = dataset.steps_per_epoch(config.batch_size)
        self.flow: Generator[tuple[Tensor, Tensor], None, None] | None = None

    def train(self, step: int, train_step: TrainStep) -> None:
        if self.flow is None:
            loader = self.dataset.train_loader(self.batch_size, **self.options, **self.training, start_step=step)
            self.flow = iter(loader)
        images, labels = next(self.flow)
        train_step(images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True))

    def images(self, step: int, full_size: bool = False) -> Tensor:
        alone = self.options | {"workers": 0}
        ((images, _),) = self.dataset.train_loader(self.batch_size, **alone, **self.training, start_step=step, steps=1)
        return images.to(self.device)

    def test(self) -> Iterable[tuple[Tensor, Tensor]]:
        for images, labels in self.dataset.test_loader(self.batch_size, **self.options):
            yield images.to(self.device), labels.to(self.device)

    def close(self) -> None:
        """Stops the worker processes."""
        if self.flow is not None:
            self.flow.close()
            self.flow = None


Source: TypeAlias = Resident | Streamed


def make_source(
    dataset: Dataset | FolderDataset,
    config: RunConfig,
    device: torch.device,
    share: tuple[int, int],
    graph: bool,
    workers: int,
) -> Source:
    """Returns the source for a dataset; `share` is the rank of this process and the number of processes."""
    if isinstance(dataset, FolderDataset):
        return Streamed(dataset, config, device, share, workers)
    return Resident(dataset, config, device, share, graph)
