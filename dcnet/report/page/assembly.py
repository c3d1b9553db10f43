"""Assembles the page from registered sections and a template, with inline styles and scripts."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from string import Template

from dcnet.registry import Registry
from dcnet.report.page.markup import Html, join, tag
from dcnet.report.page.page_sources import Sources

ASSETS = files("dcnet.report.page") / "assets"
Draw = Callable[[Sources], Html]


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        name: the anchor of the section.
        title: the heading of the section.
        order: sections are sorted by this number.
        draw: returns the content below the heading.
        script: returns JavaScript to run before the scripts of the page.
    """

    name: str
    title: str
    order: int
    draw: Draw
    script: Callable[[], str] | None = None


registry: Registry[Section] = Registry("a section", discover="dcnet.report.page")


def section(title: str, order: int, script: Callable[[], str] | None = None) -> Callable[[Draw], Draw]:
    """Returns a decorator that registers a function from sources to markup as a section, under its own name."""

    def register(draw: Draw) -> Draw:
        name = draw.__name__
        registry.add(name, Section(name, title, order, draw, script), module=draw.__module__)
        return draw

    return register


def sections() -> list[Section]:
    """Returns all sections in their order."""
    return sorted(registry.values(), key=lambda one: one.order)


def page(sources: Sources) -> str:
    """Returns the page as HTML, which is deterministic. Raises ValueError if a record is damaged."""
    found = sections()
    parts = {
        "styles": assets(".css"),
        "scripts": "\n".join([*(one.script() for one in found if one.script), assets(".js")]),
        "links": join(tag("li", tag("a", one.title, href=f"#{one.name}")) for one in found),
        "sections": join(_draw(one, sources) for one in found),
    }
    return Template((ASSETS / "page.html").read_text(encoding="utf-8")).substitute(parts)


def assets(suffix: str) -> str:
    """Returns the contents of the asset files with this suffix, sorted by name."""
    found = sorted(asset.name for asset in ASSETS.iterdir() if asset.name.endswith(suffix))
    return "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in found)


def _draw(one: Section, sources: Sources) -> Html:
    heading = tag("h2", one.title, id=f"{one.name}-heading")
    try:
        inside = one.draw(sources)
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"the section {one.title!r} cannot be drawn, since a record is damaged: {error!r}") from error
    return tag("section", heading, inside, id=one.name, aria_labelledby=f"{one.name}-heading")
