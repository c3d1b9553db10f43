"""How a network does on a test set."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from dcnet.data import Split
from dcnet.training.meter import Meter, Reading
from dcnet.training.objective import classification_loss, correct

Autocast = Callable[[], AbstractContextManager[object]]
EVALUATION_BATCH = 1000


class Evaluator:
    """Plain cross entropy and accuracy, in evaluation mode; on a GPU whole batches are replayed as a CUDA graph."""

    def __init__(self, model: nn.Module, device: torch.device, autocast: Autocast = nullcontext, graph: bool = False):
        self.model, self.autocast, self.meter = model, autocast, Meter(device)
        self.graphed, self.calls = graph, 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.images = self.labels = torch.empty(0)

    @torch.no_grad()
    def __call__(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Reading:
        """Reads batches of pixels, from 0 to 255 as bytes or from 0 to 1, and their labels."""
        was_training = self.model.training
        self.model.eval()
        self.meter.reset()
        try:
            for images, labels in batches:
                self._add(images, labels)
        finally:
            self.model.train(was_training)
        return self.meter.read()

    def _add(self, images: Tensor, labels: Tensor) -> None:
        # The first batches set up what must not be set up during a capture.
        self.calls += 1
        if not self.graphed or self.calls <= 2:
            self._compute(images, labels)
        elif self.graph is None:
            self._capture(images, labels)
        elif images.shape != self.images.shape:
            self._compute(images, labels)
        else:
            self.images.copy_(images)
            self.labels.copy_(labels)
            self.graph.replay()

    def _capture(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels, self.graph = images.clone(), labels.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._compute(self.images, self.labels)
        self.graph.replay()

    def _compute(self, images: Tensor, labels: Tensor) -> None:
        pixels = images.float() / 255 if images.dtype == torch.uint8 else images
        if pixels.is_cuda:
            pixels = pixels.contiguous(memory_format=torch.channels_last)
        with self.autocast():
            logits = self.model(pixels)
        self.meter.add(classification_loss(logits, labels), correct(logits, labels), len(labels))


def batches_of(split: Split, size: int = EVALUATION_BATCH) -> list[tuple[Tensor, Tensor]]:
    """A split as batches of bytes."""
    return list(zip(split.images.split(size), split.labels.split(size), strict=True))
