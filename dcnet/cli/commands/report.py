"""`dcnet report`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from dcnet.cli.run_options import RunsOptions
from dcnet.escapes import visible

FORMATS = (".html", ".htm")


@dataclass(frozen=True, kw_only=True)
class Command(RunsOptions):
    """Make one page of HTML of records: tables beside the paper's, curves, operators, features, robustness and speed.

    The file has everything inside and needs no network. What has no record says which command would make it.
    """

    names: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...", help_behavior_hint="(default: all)")
    ] = ()
    """Runs: their folders, their names, or as much of the beginning or end of a name as no other run has. Without any
    and without --records, all runs."""

    records: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FOLDER ...", help_behavior_hint="(optional)")] = ()
    """Folders with records, at any depth: of runs, of `dcnet bench --json`, of `dcnet plot features --records`."""

    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("report.html")
    """The page, .html."""

    def prepare(self) -> Callable[[], int]:
        from dcnet.report.options import writable
        from dcnet.report.page import Sources, page

        if self.out.suffix.lower() not in FORMATS:
            raise ValueError(f"--out is written as .html, not as {self.out.suffix!r} of {str(self.out)!r}")
        folders = self._runs()
        sources, unfinished = Sources((*folders, *self.records)), self._unfinished(folders)
        # Made now, since what is wrong with a folder or a record has to be said before anything is written.
        content, path = page(sources).encode(), writable(str(self.out))
        # Those of runs are among what is not at its end.
        damaged = [str(file) for file in sources.known.damaged if file.parent not in folders]
        return lambda: _write(path, content, len(sources.runs), unfinished, damaged)

    def _runs(self) -> tuple[Path, ...]:
        """The folders of the runs that are asked for; all of them only if nothing else is."""
        from dcnet.training import all_runs, find_run

        root = self.root()
        if self.names:
            return tuple(find_run(name, root).folder for name in dict.fromkeys(self.names))
        # Those that `dcnet list runs` shows, without what lies deeper, such as the runs of smoke tests.
        return () if self.records else tuple(run.folder for run in all_runs(root))

    def _unfinished(self, folders: tuple[Path, ...]) -> list[str]:
        """The names of runs whose records are not of their end, or cannot be read; an error if one was asked for."""
        from dcnet.experiments.known import final_record

        found = [folder.name for folder in folders if final_record(folder / "record.json") is None]
        if self.names and found:
            raise ValueError(f"the run {found[0]!r} is not at its end, or has no record of it: see `dcnet list runs`")
        return found


def _write(path: Path, content: bytes, runs: int, unfinished: list[str], damaged: list[str]) -> int:
    from dcnet.files import write_atomically

    write_atomically(path, content)
    without = f", without what is not at its end: {', '.join(unfinished)}" if unfinished else ""
    without += f", without what cannot be read: {', '.join(damaged)}" if damaged else ""
    print(f"wrote {path}, {len(content) / 1e6:.1f} MB, from {runs} runs{visible(without)}")
    return 0
