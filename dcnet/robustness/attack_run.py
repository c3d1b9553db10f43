"""Attacks the network of a run: reads test images, resumes the report card in the record, stores every measurement."""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dcnet import training
from dcnet.data import FolderDataset
from dcnet.files import fingerprint
from dcnet.robustness import report_card
from dcnet.robustness.subject import STANDARD, Effort, Subject, check_pixels
from dcnet.robustness.task import format_epsilon
from dcnet.robustness.verdict import run_checks, verdict
from dcnet.training import Record, Run
from dcnet.training.identity import check_classes, load_run_data, some_names

BATCH = 64
Results = dict[str, Any]
# A run with its network and its record, as `load_model` returns them.
Loaded = tuple[Run, nn.Module, Record]


@dataclass
class RunAttack:
    """An attack on the network of a run.

    Args:
        run: the run, whose record stores the report card.
        subject: the network, images, and budget of the attacks.
        about: dataset, network, device, and the fingerprints of weights and images, as plain values.
        source: name and weights of the run from which attacks are transferred; None without one.
        not_stored: why the card could not be stored in the record; empty if it was.
    """

    run: Run
    subject: Subject
    about: dict[str, Any]
    source: dict[str, str] | None = None
    not_stored: str = ""

    @classmethod
    def of(
        cls,
        attacked: Loaded,
        epsilon: float,
        images: int,
        source: Loaded | None = None,
        effort: Effort = STANDARD,
        data_dir: Path | None = None,
        device: str = "cpu",
        workers: int = 0,
    ) -> "RunAttack":
        """Reads test images and prepares the attack on the network of a run.

        Args:
            attacked: the run with its network and record.
            epsilon: the largest change of a pixel.
            images: the number of test images, equally many of each class.
            source: the run from which attacks are transferred; see `check_source_run`.
            effort: how strong the attacks are.
            data_dir: the folder of the datasets.
            device: the device to compute on.
            workers: the number of processes that read image files.
        """
        run, model, record = attacked
        pixels, labels, dataset = read_test_images(record, images, data_dir, workers)
        check_pixels(model.to(device), pixels, labels)
        subject = Subject(model, pixels, labels, epsilon, source and source[1].to(device), effort)
        config = record.config
        about = {
            "dataset": dataset,
            "network": ", ".join(str(config[name]) for name in ("dataset", "model", "operator")),
            "device": device,
            "weights": fingerprint(run.model_file),
            "pixels": _fingerprint_of(pixels, labels),
        }
        return cls(run, subject, about, None if source is None else _name_and_weights(source[0]))

    @property
    def name(self) -> str:
        """The name of the card in the record."""
        kind = "" if self.subject.effort == STANDARD else "-quick"
        return f"attack-{format_epsilon(self.subject.epsilon, exact=True)}-{len(self.subject.images)}-images{kind}"

    @property
    def settings(self) -> dict[str, Any]:
        subject = self.subject
        own = {"epsilon": subject.epsilon, "norm": "linf", "images": len(subject.images), "seed": subject.seed}
        return own | dataclasses.asdict(subject.effort)

    def stored_results(self) -> Results:
        """Results in the record for the same weights, images and effort; a transfer only if it has the same source."""
        card = self.run.record().evaluations.get(self.name)
        if card is None or card.results is None:
            return {}
        # Cards of older versions have no fingerprint of the images.
        same_images = card.extra.get("pixels", self.about["pixels"]) == self.about["pixels"]
        if not same_images or card.get("weights") != self.about["weights"] or card.settings != self.settings:
            return {}
        results: Results = dict(card.results)
        if self.source is not None and (results.get("transfer") or {}).get("source") != self.source:
            results.pop("transfer", None)
        return results

    def measure(
        self,
        done: Mapping[str, Any] | None = None,
        begins: Callable[[str], object] | None = None,
        ends: Callable[[str, Results], object] | None = None,
    ) -> dict[str, Any]:
        """Measures the report card. Returns it with checks and verdict; every result is stored in the record at once.

        Args:
            done: results that are not measured again, such as `stored_results`.
            begins: called with the name of a measurement before it starts.
            ends: called with the name and the result of a measurement.
        """

        def store_result(name: str, results: Results) -> None:
            if name == "transfer" and self.source is not None:
                results[name]["source"] = self.source
            self._store({"results": results})
            if ends is not None:
                ends(name, results[name])

        results = report_card.report_card(self.subject, done, begins, store_result)
        checks = run_checks(results)
        found = verdict(results, checks, self.subject.epsilon, self.subject.effort)
        described = [dataclasses.asdict(check) for check in checks]
        return self._store({"results": results, "checks": described, "verdict": found})

    def _store(self, found: Results) -> dict[str, Any]:
        """Adds the card to the record, and returns it; sets `not_stored` if that fails, as in a read-only folder."""
        card = {**self.about, "settings": self.settings, **found}
        try:
            training.add_evaluation(self.run, self.name, card)
        except (OSError, ValueError) as error:
            self.not_stored = str(error)
        return {"run": self.run.folder.resolve().name, **card}


def _name_and_weights(run: Run) -> dict[str, str]:
    return {"run": run.folder.resolve().name, "weights": fingerprint(run.model_file)}


def check_source_run(record: Record, source: Record, name: str) -> None:
    """Raises ValueError for a source that was trained on other classes, or on images of another shape."""
    own, other = record.data, source.data
    if own.classes != other.classes:
        raise ValueError(
            f"source {name!r} was trained on {len(other.classes)} classes, {some_names(other.classes)}, and not "
            f"on the {len(own.classes)} of the run, {some_names(own.classes)}: give a run with the same classes"
        )
    shapes = [f"{data.image_size} pixels and {data.channels} channels" for data in (other, own)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"source {name!r} takes images of {shapes[0]}, not of {shapes[1]}: give another source")


def read_test_images(record: Record, count: int, data_dir: Path | None, workers: int) -> tuple[Tensor, Tensor, str]:
    """Test images uint8 [N, C, H, W], equally many of each class, their labels, and the name of the dataset."""
    dataset = load_run_data(record, data_dir)
    check_classes(dataset, record)
    if isinstance(dataset, FolderDataset):
        return (*_read_files(dataset, record.data.image_size, count, workers), dataset.name)
    test = dataset.test
    chosen = test.subset(count, dataset.num_classes) if count < len(test) else test
    return chosen.images, chosen.labels, dataset.name


def _read_files(dataset: FolderDataset, size: int, count: int, workers: int) -> tuple[Tensor, Tensor]:
    """Reads equally spaced files: they are sorted by class, so every class has its share."""
    files = dataset.val
    index = torch.linspace(0, len(files) - 1, min(count, len(files))).round().long()
    chosen = dataclasses.replace(files, names=files.names[index.numpy()], labels=files.labels[index])
    loader = dataclasses.replace(dataset, val=chosen).test_loader(BATCH, size=size, workers=workers)
    images, labels = zip(*loader, strict=True)
    return torch.cat(images), torch.cat(labels)


def _fingerprint_of(images: Tensor, labels: Tensor) -> str:
    """A hash of images and labels, since the images of a folder may change."""
    digest = hashlib.sha256(repr((images.dtype, images.shape)).encode())
    for part in (images, labels):
        digest.update(part.contiguous().numpy().data)
    return digest.hexdigest()
