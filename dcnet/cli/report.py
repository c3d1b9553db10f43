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
    """Write one HTML page: tables compared with the paper's, curves, operators, features, robustness and speed.

    The file is self-contained and works offline. Where a record is missing, the page shows the command that creates it.
    """

    names: Annotated[tuple[str, ...], tyro.conf.Positional, arg("RUN ...", "all")] = ()
    """Runs: their folders, their names, or unique prefixes or suffixes of names. With neither runs nor --records, all
    runs."""

    records: Annotated[tuple[Path, ...], arg("FOLDER ...")] = ()
    """Folders with records of runs, of `dcnet bench --json` and of `dcnet plot features --records`, at any depth."""

    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("report.html")
    """The page, .html."""

    def prepare(self) -> Callable[[], int]:
        folders = [run.folder for run in self._runs()]
        sources, unfinished = report.page.Sources((*folders, *self.records)), self._unfinished(folders)
        # Build the page before anything is written, since a folder may be missing or a record damaged.
        content, path = report.page.page(sources).encode(), output_file("--out", self.out, (".html", ".htm"))
        damaged = [str(file) for file in sources.known.damaged if file.parent not in folders]

        def write() -> int:
            write_atomically(path, content)
            without = f", without unfinished runs: {', '.join(unfinished)}" if unfinished else ""
            without += f", without unreadable files: {', '.join(damaged)}" if damaged else ""
            count = f"{len(sources.runs)} run{'s' * (len(sources.runs) != 1)}"
            print(f"wrote {path}, {len(content) / 1e6:.1f} MB, from {count}{visible(without)}")
            return 0

        return write

    def _runs(self) -> list[Run]:
        if self.names:
            return self.find_runs(self.names)
        # Like `dcnet list runs`, this ignores runs in subfolders, such as those of smoke tests.
        return [] if self.records else list(training.all_runs(self.root()))

    def _unfinished(self, folders: list[Path]) -> list[str]:
        """Returns the names of unfinished runs; raises ValueError if the user named one of them."""
        found = [
            folder.name for folder in folders if experiments.status.read_final_record(folder / "record.json") is None
        ]
        if self.names and found:
            raise ValueError(f"the run {found[0]!r} has no results of a finished training: see `dcnet list runs`")
        return found
