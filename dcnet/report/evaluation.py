"""How the trained network of a run does on its test set, class by class, and whether its record says the same."""

import math
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn

from dcnet.data import Dataset, FolderDataset
from dcnet.report.listing import Listing, console
from dcnet.training.config import completed
from dcnet.training.evaluate import Autocast, Evaluator, batches_of

Record = dict[str, Any]
WORST = 5


def check_dataset(dataset: Dataset | FolderDataset, record: Record) -> None:
    """Refuses images of other classes than the network was trained on."""
    known, found = list(record["data"]["classes"]), list(dataset.classes)
    if known != found:
        raise ValueError(
            f"{dataset.name} has {len(found)} classes, {_some(found)}, here, but the run was trained on "
            f"{len(known)}, {_some(known)}: name the folder of its images with --data-dir"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def evaluate(
    model: nn.Module, record: Record, dataset: Dataset | FolderDataset, device: torch.device, workers: int
) -> Record:
    """Accuracy, error, loss, and the accuracy of each class, computed in the precision of the run."""
    layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format
    placed = model.to(device=device, memory_format=layout)  # type: ignore[call-overload]
    labels: list[Tensor] = []
    predicted: list[Tensor] = []
    hook = placed.register_forward_hook(lambda module, inputs, logits: predicted.append(logits.argmax(1).cpu()))
    batches = _noted(_test_batches(dataset, record, device, workers), labels)
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
    size, batch = record["data"]["image_size"], completed(record["config"])["batch_size"]
    return dataset.test_loader(batch, size=size, workers=workers, device=device)


def _autocast(record: Record, device: torch.device) -> Autocast:
    half = completed(record["config"])["precision"] == "bfloat16"
    return (lambda: torch.autocast(device.type, torch.bfloat16)) if half else nullcontext


def _noted(batches: Iterable[tuple[Tensor, Tensor]], labels: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches, with a bar on stderr, and their labels kept."""
    errors = console(stderr=True)
    for images, wanted in track(batches, "evaluating", console=errors, transient=True, disable=not errors.is_terminal):
        labels.append(wanted.cpu())
        yield images, wanted


def _by_class(predicted: Tensor, labels: Tensor, classes: Iterable[str]) -> list[Record]:
    """The classes of the test set, the worst first."""
    found = []
    for i, name in enumerate(classes):
        own = predicted[labels == i]
        if len(own):
            found.append({"class": name, "images": len(own), "accuracy": 100 * float((own == i).double().mean())})
    return sorted(found, key=lambda row: row["accuracy"])


def _compared(accuracy: float, record: Record) -> Record | None:
    """What the record says; nothing for a run that has no results, such as a network that was converted."""
    told = (record.get("results") or {}).get("test_accuracy")
    if told is None:
        return None
    return {"test_accuracy": told, "equal": math.isclose(told, accuracy, abs_tol=1e-6)}


def worst(found: Record) -> Listing:
    """The classes that are told worst."""
    columns = {
        "class": lambda row: row["class"],
        "images": lambda row: str(row["images"]),
        "accuracy, %": lambda row: f"{row['accuracy']:.2f}",
    }
    rows = found["classes"][:WORST]
    title = f"the worst {len(rows)} of {len(found['classes'])} classes"
    return Listing(title, columns, rows, ("images", "accuracy, %"), ("class",))


def verdict(found: Record) -> str:
    """Whether it is what the record says, in a sentence."""
    told = found["record"]
    if told is None:
        return "the record has no accuracy to compare with"
    if told["equal"]:
        return "the record says the same"
    difference = found["accuracy"] - told["test_accuracy"]
    return (
        f"the record says {told['test_accuracy']:.2f} %, so that this is {abs(difference):.2f} points "
        f"{'more' if difference > 0 else 'less'}: other data, or the rounding of another device or version"
    )
