"""Sections of the page: a file in `sections` that registers a function is one."""

from collections.abc import Callable
from dataclasses import dataclass

from dcnet.report.page.markup import Html
from dcnet.report.page.sources import Sources

Draw = Callable[[Sources], Html]


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        name: its anchor.
        title: its heading.
        order: sections stand by it, the smallest first.
        draw: what stands below the heading.
    """

    name: str
    title: str
    order: int
    draw: Draw


registry: dict[str, Section] = {}


def section(title: str, order: int) -> Callable[[Draw], Draw]:
    """A decorator that enters a function of the sources as a section, under its own name."""

    def enter(draw: Draw) -> Draw:
        name = draw.__name__
        if name in registry:
            raise ValueError(f"{name!r} is taken: there is a section of that name")
        registry[name] = Section(name, title, order, draw)
        return draw

    return enter


def sections() -> list[Section]:
    """In the order in which they stand."""
    return sorted(registry.values(), key=lambda one: one.order)
