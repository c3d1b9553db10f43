"""`dcnet report`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from dcnet import experiments, report, training
from dcnet.cli.options import RunsOptions, arg, output_file
from dcnet.files import write_atomically
from dcnet.terminal import visible

if TYPE_CHECKING:
    from dcnet.training import Run


@dataclass(frozen=True, kw_only=True)
class Command(RunsOptions):
    """Write one HTML page: tables beside the paper's, curves, operators, features, robustness and speed.

    The file is self-contained and needs no network. Where a record is missing, the page has the command that makes it.
    """

    names: Annotated[tuple[str, ...], tyro.conf.Positional, arg("RUN ...", "all")] = ()
    """Runs: their folders, their names, or unique beginnings or ends of names. Without any and without --records, all
    runs."""

    records: Annotated[tuple[Path, ...], arg("FOLDER ...")] = ()
    """Folders with records, at any depth: of runs, of `dcnet bench --json`, of `dcnet plot features --records`."""

    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("report.html")
    """The page, .html."""

    def prepare(self) -> Callable[[], int]:
        folders = [run.folder for run in self._runs()]
        sources, unfinished = report.page.Sources((*folders, *self.records)), self._unfinished(folders)
        # Before anything is written, since folders and records may be wrong.
        content, path = report.page.page(sources).encode(), output_file("--out", self.out, (".html", ".htm"))
        damaged = [str(file) for file in sources.known.damaged if file.parent not in folders]

        def write() -> int:
            write_atomically(path, content)
            without = f", without unfinished runs: {', '.join(unfinished)}" if unfinished else ""
            without += f", without unreadable files: {', '.join(damaged)}" if damaged else ""
            print(f"wrote {path}, {len(content) / 1e6:.1f} MB, from {len(sources.runs)} runs{visible(without)}")
            return 0

        return write

    def _runs(self) -> list[Run]:
        if self.names:
            return self.find_runs(self.names)
        # As `dcnet list runs`, without those in folders below, such as the runs of smoke tests.
        return [] if self.records else list(training.all_runs(self.root()))

    def _unfinished(self, folders: list[Path]) -> list[str]:
        """The runs without a final record; ValueError if the user named one of them."""
        found = [
            folder.name for folder in folders if experiments.status.read_final_record(folder / "record.json") is None
        ]
        if self.names and found:
            raise ValueError(f"the run {found[0]!r} is not finished, or has no record: see `dcnet list runs`")
        return found
