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
    """Reproduce the tables and figures of the paper: run what has no record yet, and compare with the paper.

    After Ctrl-C, the same command resumes. `--status` only reports the current results.
    """

    names: Annotated[
        Sequence[str], tyro.conf.Positional, tyro.conf.arg(metavar="EXPERIMENT...", help_behavior_hint="(required)")
    ]
    """table1, ..., contest-resnet32, ..., figure4, ...; figures for all figures; all for everything, but without
    training the contests. An unknown name lists all names."""

    seeds: Annotated[int | None, options.arg("N", "by experiment")] = None
    """The number of runs per cell, with the seeds 0, 1, ..."""

    only: Annotated[tuple[str, ...], options.arg("TEXT...", "all")] = ()
    """Only cells whose row or column starts with this, such as natural or "cos, ReLU", or both, as in "seg, sqcos"."""

    jobs: Annotated[str, tyro.conf.arg(metavar="N")] = "auto"
    """The number of runs in parallel; auto is 1, or more on a GPU that processes share by MPS."""

    status: bool = False
    """Only report results over all seeds with a record, missing cells, and differences from the paper; of all, one
    line per experiment."""

    smoke: bool = False
    """Run small versions of everything on the digits, in seconds per run; the numbers are meaningless."""

    runs: options.RunsFolder = None
    """The folder that contains the folders of runs."""

    records: Annotated[tuple[Path, ...] | None, options.arg("FOLDER...", "results, if it exists")] = None
    """Folders with records from other machines, which count as runs."""

    collect: options.OptionalFolder = None
    """Copy the records of these experiments to this folder."""

    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("figures")
    """The folder of the figures."""

    data_dir: options.DataFolder = None
    """The folder of the datasets; missing files are downloaded to a cache."""

    compile: bool = False
    """Use torch.compile, which pays off in long runs on a GPU."""

    refresh_batches: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Also evaluate with the statistics of batch normalization recomputed from N training batches, for curves."""

    def prepare(self) -> Callable[[], int]:
        options.check_at_least(1, "--seeds", self.seeds)
        options.check_new_runs_folder(self.runs)
        device = self.chosen_device()
        options.check_at_least(0, "--refresh-batches", self.refresh_batches)
        execution = training.Execution(
            device=device, compile=self.compile, data_dir=self.data_dir, refresh_batches=self.refresh_batches
        )
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
        # Check the output folders now, not after hours of work.
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
        """Returns the requested figures; a smoke test has none."""
        asked = [name for name in self.names if name.startswith("figure") or name == "all"]
        found = report.figures.chosen_figures(asked) if asked else []
        return [] if self.smoke else found

    def _run(self, work: Reproduction, figures: Sequence[str]) -> int:
        for file, problem in work.index().damaged.items():
            print(f"dcnet: skipped {str(file)!r}, which cannot be read: {visible(problem)}", file=sys.stderr)
        console, output = resilient_console("dcnet reproduce", stderr=self.json)
        code = 0 if self.status else work.run(console)
        if self.collect is not None:
            work.collect(self.collect)
        stopped = code == INTERRUPTED
        drawn = {} if stopped else self._draw(work, figures)
        if self.json:
            print(json.dumps(work.to_json() | drawn, indent=2))
        elif not stopped:
            # After an interruption, do not print tables, which would hide its message.
            _show_tables(work, compact=self.status and "all" in self.names)
            print("".join(f"{name}: {text}\n" for name, text in drawn.items()), end="")
        return code or output.code

    def _draw(self, work: Reproduction, names: Sequence[str]) -> dict[str, str]:
        """Draws the figures, but with --status only checks them; returns the file of each, or what is missing."""
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


def _show_tables(work: Reproduction, compact: bool) -> None:
    # Titles, notes and names may have brackets, such as "[0, 1]", which are not markup.
    console = Console(markup=False, emoji=False)
    if compact:
        console.print(report.experiment_tables.overview(work.statuses()))
        return
    for experiment, found in work.statuses():
        for table in report.experiment_tables.experiment_tables(experiment, found):
            console.print(table)
        for line in report.experiment_tables.summary_lines(experiment, found):
            console.print(line, soft_wrap=True, highlight=False)
