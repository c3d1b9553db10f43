from dcnet.report.page.assembly import page
from dcnet.report.page.page_sources import Sources

__all__ = [
    "Sources",
    "page",
]
