"""Show operators, margins, models, datasets, recipes or runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dcnet import report
from dcnet.cli.options import JsonOption, RunsOptions
from dcnet.terminal import visible


@dataclass(frozen=True, kw_only=True)
class Operators(JsonOption):
    """Show the magnitudes, angles and weightings of operators."""

    without_torch: ClassVar[bool] = True

    def prepare(self) -> Callable[[], int]:
        return lambda: report.listing.show(report.listing.operators(), self.json)


@dataclass(frozen=True, kw_only=True)
class Margins(JsonOption):
    """Show the margins of losses, and the logits they compute."""

    def prepare(self) -> Callable[[], int]:
        return lambda: report.listing.show({"margins": report.listing.margins()}, self.json)


@dataclass(frozen=True, kw_only=True)
class Models(JsonOption):
    """Show the networks with their numbers of parameters."""

    def prepare(self) -> Callable[[], int]:
        return lambda: report.listing.show({"models": report.listing.models()}, self.json)


@dataclass(frozen=True, kw_only=True)
class Datasets(JsonOption):
    """Show the datasets, and the folder of their files."""

    def prepare(self) -> Callable[[], int]:
        table = report.listing.data()
        return lambda: report.listing.show({"datasets": table}, self.json)


@dataclass(frozen=True, kw_only=True)
class Recipes(JsonOption):
    """Show the recipes for training."""

    def prepare(self) -> Callable[[], int]:
        return lambda: report.listing.show({"recipes": report.listing.recipes()}, self.json)


@dataclass(frozen=True, kw_only=True)
class Runs(JsonOption, RunsOptions):
    """Show the runs in a folder, the newest last, with their progress and accuracy."""

    def prepare(self) -> Callable[[], int]:
        root = self.root()
        return lambda: self._show(root)

    def _show(self, root: Path) -> int:
        table = report.listing.runs(root)
        if not table.records and not self.json:
            print(f"there are no runs in {root}: train one with `dcnet train`, or give another folder with --runs")
            return 0
        code = report.listing.show({"runs": table}, self.json)
        for problem in report.listing.problems(table):
            print(f"dcnet list runs: {visible(problem)}", file=sys.stderr)
        return code


COMMANDS = {
    "datasets": Datasets,
    "margins": Margins,
    "models": Models,
    "operators": Operators,
    "recipes": Recipes,
    "runs": Runs,
}
