"""From records to the page: sections into the template, with all styles and scripts inside."""

from importlib.resources import files
from string import Template

from dcnet.report.page import sections as _sections  # noqa: F401 (they fill the registry)
from dcnet.report.page.markup import Html, join, tag
from dcnet.report.page.section import Section, sections
from dcnet.report.page.sources import Sources

ASSETS = files("dcnet.report.page") / "assets"


def page(sources: Sources) -> str:
    """The whole page; the same records give the same page, and one that lacks something is a ValueError."""
    found = sections()
    parts = {
        "styles": assets(".css"),
        "scripts": assets(".js"),
        "links": join(tag("li", tag("a", one.title, href=f"#{one.name}")) for one in found),
        "sections": join(_drawn(one, sources) for one in found),
    }
    return Template((ASSETS / "page.html").read_text(encoding="utf-8")).substitute(parts)


def assets(suffix: str) -> str:
    """The files of that kind one after the other, by name."""
    found = sorted(asset.name for asset in ASSETS.iterdir() if asset.name.endswith(suffix))
    return "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in found)


def _drawn(one: Section, sources: Sources) -> Html:
    heading = tag("h2", one.title, id=f"{one.name}-heading")
    try:
        inside = one.draw(sources)
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        problem = f"some record is not as it should be: {error!r}"
        raise ValueError(f"the section {one.title!r} cannot be drawn, since {problem}") from error
    return tag("section", heading, inside, id=one.name, aria_labelledby=f"{one.name}-heading")
