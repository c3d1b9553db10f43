"""Evaluates the network of a run on its test set, in total and per class, and compares the accuracy with its record."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn

from dcnet.data import Dataset, FolderDataset
from dcnet.export import export_onnx, run_onnx
from dcnet.inference.fold_network import fold
from dcnet.table import Table
from dcnet.terminal import console
from dcnet.training import Record
from dcnet.training.evaluation import Autocast, Evaluator, batches_of

Values = dict[str, Any]
WORST = 5


def evaluate(
    model: nn.Module, record: Record, dataset: Dataset | FolderDataset, device: torch.device | str, workers: int
) -> Values:
    """Returns accuracy, error, loss and accuracy per class, computed in the precision of the run."""
    device = torch.device(device)
    layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format
    placed = model.to(device=device, memory_format=layout)  # type: ignore[call-overload]
    labels: list[Tensor] = []
    predicted: list[Tensor] = []
    hook = placed.register_forward_hook(lambda module, inputs, logits: predicted.append(logits.argmax(1).cpu()))
    batches = _with_progress(_test_batches(dataset, record, device, workers), labels)
    reading = Evaluator(placed, device, _autocast(record, device))(batches)
    hook.remove()
    return {
        "images": sum(map(len, labels)),
        "accuracy": reading.accuracy,
        "error": 100 - reading.accuracy,
        "loss": reading.loss if math.isfinite(reading.loss) else None,
        "record": _compared(reading.accuracy, record),
        "classes": _by_class(torch.cat(predicted), torch.cat(labels), dataset.classes),
    }


def _test_batches(
    dataset: Dataset | FolderDataset, record: Record, device: torch.device, workers: int
) -> Iterable[tuple[Tensor, Tensor]]:
    if not isinstance(dataset, FolderDataset):
        return batches_of(dataset.test.to(device))
    size, batch = record.data.image_size, record.settings["batch_size"]
    return dataset.test_loader(batch, size=size, workers=workers, device=device)


def _autocast(record: Record, device: torch.device) -> Autocast:
    half = record.settings["precision"] == "bfloat16"
    return (lambda: torch.autocast(device.type, torch.bfloat16)) if half else nullcontext


def _with_progress(batches: Iterable[tuple[Tensor, Tensor]], labels: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the batches with a progress bar on stderr, and appends their labels to a list."""
    errors = console(stderr=True)
    for images, wanted in track(batches, "evaluating", console=errors, transient=True, disable=not errors.is_terminal):
        labels.append(wanted.cpu())
        yield images, wanted


def _by_class(predicted: Tensor, labels: Tensor, classes: Iterable[str]) -> list[Values]:
    """Returns the accuracy of each class in the test set, lowest first."""
    found = []
    for i, name in enumerate(classes):
        own = predicted[labels == i]
        if len(own):
            found.append({"class": name, "images": len(own), "accuracy": 100 * float((own == i).double().mean())})
    return sorted(found, key=lambda row: row["accuracy"])


def _compared(accuracy: float, record: Record) -> Values | None:
    """Returns the recorded accuracy and whether it is equal; None without results, as for a converted network."""
    recorded = record.results.test_accuracy if record.results else None
    if recorded is None:
        return None
    return {"test_accuracy": recorded, "equal": math.isclose(recorded, accuracy, abs_tol=1e-6)}


def worst_classes(found: Values) -> Table:
    """Returns a table of the classes with the lowest accuracy."""
    rows = [[row["class"], str(row["images"]), f"{row['accuracy']:.2f}"] for row in found["classes"][:WORST]]
    title = f"lowest accuracy: {len(rows)} of {len(found['classes'])} classes"
    return Table.of_rows(["class", "images", "accuracy, %"], rows, title=title)


def verdict(found: Values) -> str:
    """Returns a sentence that compares the accuracy with the record."""
    recorded = found["record"]
    if recorded is None:
        return "the record has no accuracy to compare with"
    if recorded["equal"]:
        return "equal to the record"
    difference = found["accuracy"] - recorded["test_accuracy"]
    return (
        f"the record has {recorded['test_accuracy']:.2f} %, a difference of {difference:+.2f}: the data differ, or "
        "another device or version rounds differently"
    )


IMAGES = 16


@torch.no_grad()
def export(
    model: nn.Module, shape: tuple[int, int, int], path: Path, metadata: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """Writes the folded network as ONNX, and compares its logits in onnxruntime with those in torch."""
    images = torch.rand(IMAGES, *shape, generator=torch.Generator().manual_seed(0))
    export_onnx(fold(model), images[:2], path, metadata=metadata)
    expected, (found,) = model(images).double(), run_onnx(path.read_bytes(), images)
    return {
        "bytes": path.stat().st_size,
        "largest_difference": float((expected - found).abs().max()),
        "largest_logit": float(expected.abs().max()),
    }
