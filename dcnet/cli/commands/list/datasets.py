"""`dcnet list datasets`."""

from collections.abc import Callable
from dataclasses import dataclass

from dcnet.cli.list_options import ListOptions


@dataclass(frozen=True, kw_only=True)
class Command(ListOptions):
    """Show the datasets by name, and where they are looked for."""

    def prepare(self) -> Callable[[], int]:
        from dcnet.report import catalogue
        from dcnet.report.listing import show

        listing = catalogue.data()
        return lambda: show({"datasets": listing}, self.json)
