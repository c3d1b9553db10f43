"""`dcnet list models`."""

from collections.abc import Callable
from dataclasses import dataclass

from dcnet.cli.list_options import ListOptions


@dataclass(frozen=True, kw_only=True)
class Command(ListOptions):
    """Show the networks by name, with the number of their parameters."""

    def prepare(self) -> Callable[[], int]:
        from dcnet.report import catalogue
        from dcnet.report.listing import show

        return lambda: show({"models": catalogue.models()}, self.json)
