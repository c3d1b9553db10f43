"""`dcnet list recipes`."""

from collections.abc import Callable
from dataclasses import dataclass

from dcnet.cli.list_options import ListOptions


@dataclass(frozen=True, kw_only=True)
class Command(ListOptions):
    """Show how networks are trained, by the names of the recipes."""

    def prepare(self) -> Callable[[], int]:
        from dcnet.report import catalogue
        from dcnet.report.listing import show

        return lambda: show({"recipes": catalogue.recipes()}, self.json)
