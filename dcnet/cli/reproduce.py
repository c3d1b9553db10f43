"""`dcnet reproduce`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console

from dcnet import experiments, report, training
from dcnet.cli import options
from dcnet.exit_codes import INTERRUPTED
from dcnet.terminal import resilient_console, visible

if TYPE_CHECKING:
    from dcnet.experiments.reproduction import Reproduction

RECORDS = Path("results")


@dataclass(frozen=True, kw_only=True)
class Command(options.DeviceOption, options.JsonOption):
    """Reproduce the tables of the paper: run all experiments without a record, and compare with the paper.

    Ctrl-C stops it, and the same command resumes. `--status` only reports what there is.
    """

    names: Annotated[
        Sequence[str], tyro.conf.Positional, tyro.conf.arg(metavar="EXPERIMENT...", help_behavior_hint="(required)")
    ]
    """table1, ..., faces, ..., figure4, ..., figures for all figures, or all; a wrong name lists the known ones."""

    seeds: Annotated[int | None, options.arg("N", "by experiment")] = None
    """Runs of each cell, with the seeds 0, 1, ..."""

    only: Annotated[tuple[str, ...], options.arg("TEXT...", "all")] = ()
    """Only cells whose row or column starts with this: natural or "cos, ReLU", or both, such as "seg, sqcos"."""

    jobs: Annotated[str, tyro.conf.arg(metavar="N")] = "auto"
    """Runs side by side; auto is one, and more on a GPU that processes share by MPS."""

    status: bool = False
    """Only report the results over all seeds with a record, what is missing, and the differences from the paper."""

    smoke: bool = False
    """Run everything in a small version on the digits: seconds per run, and meaningless numbers."""

    runs: options.RunsFolder = None
    """The folder with the folders of runs."""

    records: Annotated[tuple[Path, ...] | None, options.arg("FOLDER...", "results, if it exists")] = None
    """Folders with records from elsewhere, which count as runs."""

    collect: options.OptionalFolder = None
    """Copy the records of these experiments to this folder."""

    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("figures")
    """The folder of the figures."""

    data_dir: options.DataFolder = None
    """The folder of the datasets; missing files are downloaded to a cache."""

    compile: bool = False
    """Use torch.compile, which is worth it for long runs on a GPU."""

    def prepare(self) -> Callable[[], int]:
        options.check_at_least(1, "--seeds", self.seeds)
        options.check_new_runs_folder(self.runs)
        device = self.chosen_device()
        execution = training.Execution(device=device, compile=self.compile, data_dir=self.data_dir)
        tables = [name for name in self.names if not name.startswith("figure")]
        work = experiments.reproduction.Reproduction(
            tables,
            self.seeds,
            self.smoke,
            self.runs,
            self._folders(),
            execution,
            experiments.reproduction.parse_jobs(self.jobs, device),
            self.only,
        )
        figures = self._figures()
        if not tables and not figures:
            why, such = ("--smoke draws no figures: ", "table3") if self.names else ("", "table3, figures")
            raise ValueError(f"{why}name what to reproduce, such as {such} or all")
        # Fail before hours of work, not after them.
        if self.collect is not None:
            options.writable(str(self.collect / "record.json"))
        if figures and not self.status:
            options.writable(str(self.out / "figure.png"))
        return lambda: self._run(work, figures)

    def _folders(self) -> tuple[Path, ...]:
        if self.records is None:
            return (RECORDS,) if RECORDS.is_dir() else ()
        return tuple(self.records)

    def _figures(self) -> list[str]:
        """The requested figures; a smoke test has none."""
        asked = [name for name in self.names if name.startswith("figure") or name == "all"]
        found = report.figures.chosen_figures(asked) if asked else []
        return [] if self.smoke else found

    def _run(self, work: Reproduction, figures: Sequence[str]) -> int:
        for file, problem in work.index().damaged.items():
            print(f"dcnet: left out {str(file)!r}, which cannot be read: {visible(problem)}", file=sys.stderr)
        console, output = resilient_console("dcnet reproduce", stderr=self.json)
        code = 0 if self.status else work.run(console)
        if self.collect is not None:
            work.collect(self.collect)
        stopped = code == INTERRUPTED
        drawn = {} if stopped else self._draw(work, figures)
        if self.json:
            print(json.dumps(work.to_json() | drawn, indent=2))
        elif not stopped:
            # After an interruption, the tables would scroll its message out of sight.
            _show_tables(work)
            print("".join(f"{name}: {text}\n" for name, text in drawn.items()), end="")
        return code or output.code

    def _draw(self, work: Reproduction, names: Sequence[str]) -> dict[str, str]:
        """Draws the figures, except with --status; returns for each its file, or what is missing."""
        texts = {}
        for name in names:
            path = self.out / f"{name}.png"
            try:
                figure = report.figures.figures[name](report.figures.Sources(work.index(), self._folders()))
            except ValueError as error:
                texts[name] = str(error)
                continue
            texts[name] = "can be drawn" if self.status else str(path)
            if not self.status:
                report.drawing.save(figure, path)
        return texts


def _show_tables(work: Reproduction) -> None:
    # Titles, notes and names may have brackets, such as "[0, 1]", which are not markup.
    console = Console(markup=False, emoji=False)
    for experiment, found in work.statuses():
        console.print(report.experiment_tables.experiment_table(experiment, found))
        for line in report.experiment_tables.summary_lines(experiment, found):
            console.print(line, soft_wrap=True, highlight=False)
