"""Where batches come from: a dataset that lives on the device, or a folder of images that is read by workers."""

from collections.abc import Callable, Generator, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from dcnet.data import BatchDraws, Batches, Dataset, FolderDataset
from dcnet.training.capture import Captured
from dcnet.training.config import RunConfig
from dcnet.training.evaluate import batches_of

TrainStep = Callable[[Tensor, Tensor], None]


class Source(Protocol):
    """Batches for training, by step, and for testing."""

    steps_per_epoch: int
    batch_size: int

    def train(self, step: int, train_step: TrainStep) -> None:
        """Trains on the batch of a step, counted from 0 over the whole run; steps follow one another."""

    def images(self, step: int) -> Tensor:
        """The images of a step once more."""

    def test(self) -> Iterable[tuple[Tensor, Tensor]]:
        """The batches of the test set."""

    def close(self) -> None:
        """Ends the processes that read images, if there are any."""


class Resident:
    """All images on the device as bytes, augmented there."""

    def __init__(self, dataset: Dataset, config: RunConfig, device: torch.device, share: tuple[int, int], graph: bool):
        train = dataset.train
        if config.train_images is not None:
            train = train.first(config.train_images, dataset.num_classes)
        rank, world = share
        self.batches = Batches(
            train.to(device), config.batch_size, config.augmentation, config.seed, rank=rank, world=world
        )
        self.steps_per_epoch, self.batch_size = self.batches.steps_per_epoch, self.batches.batch_size
        self.test_batches = batches_of(dataset.test.to(device))
        self.graph = graph
        self._captured: Captured | None = None

    def train(self, step: int, train_step: TrainStep) -> None:
        def call(draws: BatchDraws) -> None:
            train_step(*self._batch(draws))

        if self.graph and self._captured is None:
            self._captured = Captured(call)
        (self._captured or call)(self.batches.draws(step))

    def images(self, step: int) -> Tensor:
        return self._batch(self.batches.draws(step))[0]

    def test(self) -> Iterable[tuple[Tensor, Tensor]]:
        return self.test_batches

    def close(self) -> None:
        """Nothing to do: no process reads ahead."""

    def _batch(self, draws: BatchDraws) -> tuple[Tensor, Tensor]:
        images, labels = self.batches.images(draws)
        # As cuDNN likes them; on a CPU it makes no difference that would be worth the copy.
        return images.contiguous(memory_format=torch.channels_last) if images.is_cuda else images, labels


class Streamed:
    """Images from files, decoded by worker processes; far too many to be kept."""

    def __init__(
        self, dataset: FolderDataset, config: RunConfig, device: torch.device, share: tuple[int, int], workers: int
    ):
        self.dataset, self.device, self.workers = dataset, device, workers
        rank, world = share
        self.options: dict[str, Any] = {"size": config.image_size or 224, "workers": workers}
        self.training: dict[str, Any] = {"seed": config.seed, "flip": config.augmentation.flip}
        self.training |= {"rank": rank, "world": world}
        self.joint = config.batch_size
        self.batch_size = config.batch_size // world
        self.steps_per_epoch = dataset.steps_per_epoch(config.batch_size)
        self.flow: Generator[tuple[Tensor, Tensor], None, None] | None = None

    def train(self, step: int, train_step: TrainStep) -> None:
        if self.flow is None:
            loader = self.dataset.train_loader(self.joint, **self.options, **self.training, start_step=step)
            self.flow = iter(loader)
        images, labels = next(self.flow)
        train_step(images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True))

    def images(self, step: int) -> Tensor:
        alone = self.options | {"workers": 0}
        ((images, _),) = self.dataset.train_loader(self.joint, **alone, **self.training, start_step=step, steps=1)
        return images.to(self.device)

    def test(self) -> Iterable[tuple[Tensor, Tensor]]:
        for images, labels in self.dataset.test_loader(self.joint, **self.options):
            yield images.to(self.device), labels.to(self.device)

    def close(self) -> None:
        if self.flow is not None:
            self.flow.close()
            self.flow = None


def make_source(
    dataset: Dataset | FolderDataset,
    config: RunConfig,
    device: torch.device,
    share: tuple[int, int],
    graph: bool,
    workers: int,
) -> Source:
    """The source for a kind of dataset; `share` is this process's number and how many there are."""
    _check(dataset, config)
    if isinstance(dataset, FolderDataset):
        return Streamed(dataset, config, device, share, workers)
    return Resident(dataset, config, device, share, graph)


def _check(dataset: Dataset | FolderDataset, config: RunConfig) -> None:
    """Refuses what would be written down about a run and not be done."""
    if isinstance(dataset, FolderDataset):
        asked = {
            "train_images": config.train_images,
            "pad": config.augmentation.pad,
            "cutout": config.augmentation.cutout,
        }
        for name, value in asked.items():
            if value:
                raise ValueError(f"{name}={value} does not apply to a folder of images, as {dataset.name}: omit it")
    elif config.image_size not in (None, dataset.image_size):
        size = dataset.image_size
        raise ValueError(
            f"image_size={config.image_size} does not fit {dataset.name}, whose images have {size}: use that"
        )
