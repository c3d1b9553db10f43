"""Scores of pairs of image files, by the network of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcnet.cli.run_options import loaded

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dcnet.training import Run

BATCH = 64


@dataclass(frozen=True)
class Comparer:
    """The network of a run, and where it is computed."""

    run: Run
    model: nn.Module
    record: dict[str, Any]
    device: str

    @property
    def name(self) -> str:
        # Of the folder that one is in, "." has no name.
        return self.run.folder.resolve().name

    @cached_property
    def weights(self) -> str:
        """What tells the weights from others."""
        from dcnet.verification import fingerprint

        return fingerprint(self.run.model_file)

    @classmethod
    def of(cls, run: Run, device: str) -> Comparer:
        """That of the run; a network that has no features to compare is an error."""
        model, record = loaded(run)
        network = getattr(model, "network", model)
        if not callable(getattr(network, "features", None)):
            kind = type(network).__name__
            raise ValueError(
                f"the run {run.folder.name!r} has no features to compare: its network, {kind}, has no method `features`"
            )
        return cls(run, model, record, device)

    def scores(self, paths: Sequence[Path], first: Tensor, second: Tensor, flip: bool) -> Tensor:
        """The cosines float32 [P] of the files at the indices `first` with those at `second`, on the CPU."""
        from dcnet.verification import pair_scores

        return pair_scores(self.embeddings(paths, flip), first, second).cpu()

    def embeddings(self, paths: Sequence[Path], flip: bool) -> Tensor:
        """Those of the files, on the device, in float32 whatever the network was trained in."""
        from dcnet.verification import embed

        names = [str(path) for path in paths]
        return embed(self.model, self._batches(paths), self.device, flip, names=names)

    def _batches(self, paths: Sequence[Path]) -> Iterator[Tensor]:
        """The images as the run takes them, with a bar on stderr."""
        from rich.progress import track

        from dcnet.cli.image_options import read_images
        from dcnet.report.listing import console

        errors = console(stderr=True)
        parts = [paths[begin : begin + BATCH] for begin in range(0, len(paths), BATCH)]
        hidden = not errors.is_terminal or len(parts) == 1
        for part in track(parts, "reading images", console=errors, transient=True, disable=hidden):
            yield read_images(part, self.record, invert=False)
