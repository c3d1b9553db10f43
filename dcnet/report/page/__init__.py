"""One page of HTML with all that records tell: tables, curves, pictures, and the command behind each number."""

from dcnet.report.page.assembly import page
from dcnet.report.page.sources import Sources

__all__ = ["Sources", "page"]
