"""`dcnet list runs`."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dcnet.cli.list_options import ListOptions
from dcnet.cli.run_options import RunsOptions
from dcnet.escapes import visible


@dataclass(frozen=True, kw_only=True)
class Command(ListOptions, RunsOptions):
    """Show the runs in a folder, the newest last: how far they are, and what they reached."""

    def prepare(self) -> Callable[[], int]:
        root = self.root()
        return lambda: self._show(root)

    def _show(self, root: Path) -> int:
        from dcnet.report.listing import show
        from dcnet.report.run_list import problems, runs

        listing = runs(root)
        if not listing.rows and not self.json:
            print(f"there are no runs in {root}: make one with `dcnet train`, or name another folder with --runs")
            return 0
        code = show({"runs": listing}, self.json)
        for problem in problems(listing.rows):
            print(f"dcnet list runs: {visible(problem)}", file=sys.stderr)
        return code
