"""`dcnet list operators`."""

from collections.abc import Callable
from dataclasses import dataclass

from dcnet.cli.list_options import ListOptions


@dataclass(frozen=True, kw_only=True)
class Command(ListOptions):
    """Show the magnitudes, angles and weightings that operators are made of."""

    def prepare(self) -> Callable[[], int]:
        from dcnet.report import catalogue
        from dcnet.report.listing import show

        return lambda: show(catalogue.operators(), self.json)
