"""HTML in small: whatever is not markup already is escaped, so that no record can put any into the page."""

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

VOID = ("input", "line", "rect", "path", "circle")


class Html(str):
    """Text that is markup."""

    __slots__ = ()


def tag(name: str, *children: str, **attributes: Any) -> Html:
    """An element; `class_` gives class, `aria_label` gives aria-label, None leaves an attribute out, True is bare."""
    words = [name, *(_attribute(key, value) for key, value in attributes.items() if value not in (None, False))]
    opened = f"<{' '.join(words)}"
    # Those of SVG are closed by the slash alone; without it what follows would be inside of them.
    return Html(f"{opened}/>" if name in VOID else f"{opened}>{join(children)}</{name}>")


def _attribute(key: str, value: Any) -> str:
    # SVG has names in two cases, such as viewBox, which must stay as they are.
    name = key.rstrip("_").replace("_", "-")
    return name if value is True else f'{name}="{html.escape(str(value))}"'


def join(parts: Iterable[str], between: str = "") -> Html:
    """Markup one after the other."""
    return Html(between.join(part if isinstance(part, Html) else html.escape(part, quote=False) for part in parts))


def paragraph(*children: str) -> Html:
    return tag("p", *children)


def code(text: str) -> Html:
    return tag("code", text)


def data(value: Any, **attributes: Any) -> Html:
    """A value for scripts; nothing in it can end the element early."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return tag("script", Html(text), type="application/json", **attributes)


def disclosure(summary: str, *children: str, class_: str | None = None, title: str | None = None) -> Html:
    """What is shown when it is asked for."""
    return tag("details", tag("summary", summary, title=title), *children, class_=class_)


def table(key: str, caption: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Html:
    """A table in a box of its own that scrolls, so that the page does not; the first cell of a row is its heading."""
    head = tag("thead", tag("tr", *(tag("th", heading, scope="col") for heading in headings)))
    body = tag("tbody", *(tag("tr", tag("th", row[0], scope="row"), *map(_cell, row[1:])) for row in rows))
    inside = tag("table", tag("caption", caption, id=f"{key}-caption"), head, body)
    # A box that scrolls must be reachable by the keyboard, and then needs a name.
    return tag("div", inside, class_="scroll", tabindex="0", role="region", aria_labelledby=f"{key}-caption")


def _cell(content: str) -> Html:
    return tag("td", content)
