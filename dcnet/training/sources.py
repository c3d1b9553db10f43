"""Sources of batches: a dataset on the device, or a folder of images that worker processes read."""

from collections.abc import Callable, Generator, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from dcnet.data import BatchDraws, Batches, Dataset, FolderDataset
from dcnet.training.config import RunConfig
from dcnet.training.evaluation import batches_of

TrainStep = Callable[[Tensor, Tensor], None]
# Eager calls before a capture.
WARMUP = 3


class Captured:
    """A function of a batch as a CUDA graph: the first calls are eager, the next is captured, all others replay it."""

    def __init__(self, call: Callable[[BatchDraws], None]):
        self.call, self.calls = call, 0
        self.static: BatchDraws | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.side = torch.cuda.Stream()

    def __call__(self, draws: BatchDraws) -> None:
        if self.static is None:
            self.static = draws.clone()
        self.static.copy_(draws)
        self.calls += 1
        if self.calls <= WARMUP:
            self._warm_up()
            return
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.call(self.static)
        self.graph.replay()

    def _warm_up(self) -> None:
        """Runs on a side stream, so that libraries are initialized before the capture."""
        assert self.static is not None
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            self.call(self.static)
        torch.cuda.current_stream().wait_stream(self.side)


class Source(Protocol):
    """Batches for training, by step, and for the test."""

    steps_per_epoch: int
    batch_size: int

    def train(self, step: int, train_step: TrainStep) -> None:
        """Trains on the batch of a step, counted from 0 over the whole run; calls are in the order of steps."""

    def images(self, step: int) -> Tensor:
        """The images of a step, to inspect it again."""

    def test(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Batches of the test set."""

    def close(self) -> None:
        """Stops the worker processes."""


class Resident:
    """All images on the device as bytes, and augmented there."""

    def __init__(self, dataset: Dataset, config: RunConfig, device: torch.device, share: tuple[int, int], graph: bool):
        train = dataset.train
        if config.train_images is not None:
            train = train.subset(config.train_images, dataset.num_classes)
        rank, world = share
        self.batches = Batches(
            train.to(device), config.batch_size, config.augmentation, config.seed, rank=rank, world=world
        )
        self.steps_per_epoch, self.batch_size = self.batches.steps_per_epoch, self.batches.batch_size
        self.test_batches = batches_of(dataset.test.to(device))
        self.graph = graph
        self._captured: Captured | None = None

    def train(self, step: int, train_step: TrainStep) -> None:
        draws = self.batches.draws(step)
        if not self.graph:
            train_step(*self._batch(draws))
            return
        if self._captured is None:
            self._captured = Captured(lambda given: train_step(*self._batch(given)))
        self._captured(draws)

    def images(self, step: int) -> Tensor:
        return self._batch(self.batches.draws(step))[0]

    def test(self) -> Iterable[tuple[Tensor, Tensor]]:
        return self.test_batches

    def close(self) -> None:
        """Nothing to stop."""

    def _batch(self, draws: BatchDraws) -> tuple[Tensor, Tensor]:
        images, labels = self.batches.images(draws)
        # The layout that is fastest for cuDNN; on a CPU the copy costs more than it saves.
        return images.contiguous(memory_format=torch.channels_last) if images.is_cuda else images, labels


class Streamed:
    """Images from files, decoded by worker processes."""

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
    """The source for a dataset; `share` is the rank of this process and the number of processes."""
    _check(dataset, config)
    if isinstance(dataset, FolderDataset):
        return Streamed(dataset, config, device, share, workers)
    return Resident(dataset, config, device, share, graph)


def _check(dataset: Dataset | FolderDataset, config: RunConfig) -> None:
    """Raises ValueError for values of the config that would have no effect."""
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
