"""`dcnet list margins`."""

from collections.abc import Callable
from dataclasses import dataclass

from dcnet.cli.list_options import ListOptions


@dataclass(frozen=True, kw_only=True)
class Command(ListOptions):
    """Show the margins of losses that learn angles, and the logits they give."""

    def prepare(self) -> Callable[[], int]:
        from dcnet.report import catalogue
        from dcnet.report.listing import show

        return lambda: show({"margins": catalogue.margins()}, self.json)
