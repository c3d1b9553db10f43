"""`dcnet reproduce`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from dcnet.cli.bench_options import Device, at_least, chosen_device
from dcnet.cli.run_options import check_runs_to_be
from dcnet.escapes import visible

if TYPE_CHECKING:
    from dcnet.experiments.reproduction import Reproduction

KEPT = Path("results")


@dataclass(frozen=True, kw_only=True)
class Command:
    """Make the tables of the paper: run what has no record yet, and put ours beside the paper's.

    It can be stopped at any time with Ctrl-C; the same command goes on. `--status` only says what is there.
    """

    names: Annotated[
        Sequence[str], tyro.conf.Positional, tyro.conf.arg(metavar="EXPERIMENT...", help_behavior_hint="(required)")
    ]
    """table1, ..., faces, ..., figure4, ..., figures for all figures, or all; a wrong name lists what there is."""

    seeds: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="(default: by experiment)")] = None
    """Runs of each cell, with the seeds 0, 1, ..."""

    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT...", help_behavior_hint="(default: all)")] = ()
    """Those cells alone whose row or column begins with it, as natural or "cos, ReLU", or both, as "seg, sqcos"."""

    jobs: Annotated[str, tyro.conf.arg(metavar="N")] = "auto"
    """Runs side by side; auto is one, and more on a GPU that processes share by MPS."""

    status: bool = False
    """Only say what is there, over all seeds that have a record, what is missing, and how far from the paper it is."""

    json: bool = False
    """Print one JSON document and nothing else."""

    smoke: bool = False
    """Everything in small, on the digits: seconds a run, and numbers that mean nothing."""

    runs: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="(default: runs)")] = None
    """Where the folders of runs are."""

    records: Annotated[
        tuple[Path, ...] | None,
        tyro.conf.arg(metavar="FOLDER...", help_behavior_hint="(default: results, if it is there)"),
    ] = None
    """Folders with records from elsewhere, which count as runs do."""

    collect: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="(optional)")] = None
    """Copy the records of these experiments there, to be kept or brought to another machine."""

    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("figures")
    """Where figures are drawn."""

    data_dir: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="(default: DCNET_DATA)")] = None
    """Where the datasets are; what is missing is downloaded to a cache."""

    device: Device = "auto"
    """Where to compute; auto is cuda where there is a GPU."""

    compile: bool = False
    """Compile the networks by torch.compile: pays in long runs on a GPU."""

    def prepare(self) -> Callable[[], int]:
        from dcnet.experiments.reproduction import Reproduction, jobs_of
        from dcnet.report.options import writable
        from dcnet.training import Execution

        if self.seeds is not None:
            at_least(1, "--seeds", self.seeds)
        check_runs_to_be(self.runs)
        device = chosen_device(self.device)
        execution = Execution(device=device, compile=self.compile, data_dir=self.data_dir)
        jobs, tables = jobs_of(self.jobs, device), [name for name in self.names if not name.startswith("figure")]
        work = Reproduction(tables, self.seeds, self.smoke, self.runs, self._folders(), execution, jobs, self.only)
        pictures = self._figures()
        if not tables and not pictures:
            why, there = ("--smoke draws no figures: ", "table3") if self.names else ("", "table3, figures")
            raise ValueError(f"{why}name what to reproduce, such as {there} or all")
        # Before hours of work, and not after them.
        if self.collect is not None:
            writable(str(self.collect / "record.json"))
        if pictures and not self.status:
            writable(str(self.out / "figure.png"))
        return lambda: self._carry_out(work, pictures)

    def _folders(self) -> tuple[Path, ...]:
        """Where records are; those that come with the source count without a word."""
        if self.records is None:
            return (KEPT,) if KEPT.is_dir() else ()
        return tuple(self.records)

    def _figures(self) -> list[str]:
        """Those that are asked for; a smoke test trains nothing that could be drawn."""
        asked = [name for name in self.names if name.startswith("figure") or name == "all"]
        if not asked:
            return []
        from dcnet.report.figures import chosen_figures

        found = chosen_figures(asked)
        return [] if self.smoke else found

    def _carry_out(self, work: Reproduction, pictures: Sequence[str]) -> int:
        from dcnet.experiments.reproduction import INTERRUPTED
        from dcnet.output import lasting_console

        # Before hours are spent on what may only have to be copied once more.
        for file, problem in work.known().damaged.items():
            print(f"dcnet: left out {str(file)!r}, which cannot be read: {visible(problem)}", file=sys.stderr)
        console, output = lasting_console("dcnet reproduce", stderr=self.json)
        code = 0 if self.status else work.run(console)
        if self.collect is not None:
            work.collect(self.collect)
        stopped = code == INTERRUPTED
        drawn = {} if stopped else self._draw(work, pictures)
        if self.json:
            print(json.dumps(work.described() | drawn, indent=2))
        elif not stopped:
            # After an interruption, tables would push what was said of it out of sight.
            self._show(work)
            print("".join(f"{name}: {told}\n" for name, told in drawn.items()), end="")
        return code or output.code

    def _draw(self, work: Reproduction, pictures: Sequence[str]) -> dict[str, str]:
        """Draws what there are records of, unless only the state is asked for; says which file, or what is missing."""
        if not pictures:
            return {}
        from dcnet.report.figures import Sources, figures
        from dcnet.report.plots import save

        told = {}
        for name in pictures:
            try:
                figure = figures[name](Sources(work.known(), self._folders()))
            except ValueError as error:
                told[name] = str(error)
                continue
            told[name] = "can be drawn" if self.status else str(self.out / f"{name}.png")
            if not self.status:
                save(figure, self.out / f"{name}.png")
        return told

    def _show(self, work: Reproduction) -> None:
        from rich.console import Console

        from dcnet.report.experiments import rich_table, summary_lines

        # Titles, notes and names may have brackets, as "[0, 1]", which are no styles.
        console = Console(markup=False, emoji=False)
        for experiment, found in work.statuses():
            console.print(rich_table(experiment, found))
            for line in summary_lines(experiment, found):
                console.print(line, soft_wrap=True, highlight=False)
