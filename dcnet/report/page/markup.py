"""Builds HTML; all text that is not `Html` is escaped."""

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

from dcnet.table import Table

VOID = ("input", "line", "rect", "path", "circle")


class Html(str):
    """A string of markup, which is not escaped again."""

    __slots__ = ()

    def __html__(self) -> str:
        return str(self)


def tag(name: str, *children: str, **attributes: Any) -> Html:
    """Returns an element. `class_` is class, `aria_label` is aria-label, None omits an attribute, True its value."""
    words = [name, *(_attribute(key, value) for key, value in attributes.items() if value not in (None, False))]
    opened = f"<{' '.join(words)}"
    # Void elements of SVG need the slash.
    return Html(f"{opened}/>" if name in VOID else f"{opened}>{join(children)}</{name}>")


def _attribute(key: str, value: Any) -> str:
    # Names in SVG, such as viewBox, are case-sensitive.
    name = key.rstrip("_").replace("_", "-")
    return name if value is True else f'{name}="{html.escape(str(value))}"'


def join(parts: Iterable[str], between: str = "") -> Html:
    """Concatenates the parts, and escapes those that are not markup."""
    return Html(between.join(part if isinstance(part, Html) else html.escape(part, quote=False) for part in parts))


def paragraph(*children: str) -> Html:
    return tag("p", *children)


def code(text: str) -> Html:
    return tag("code", text)


def data(value: Any, **attributes: Any) -> Html:
    """Returns a script element with a JSON value, escaped so that it cannot end the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return tag("script", Html(text), type="application/json", **attributes)


def disclosure(summary: str, *children: str, class_: str | None = None, title: str | None = None) -> Html:
    """Returns content that is shown on click on the summary."""
    return tag("details", tag("summary", summary, title=title), *children, class_=class_)


def table(key: str, caption: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Html:
    """Returns a table in a box that scrolls horizontally; the first cell of a row is its heading."""
    inside = Html(Table.of_rows(headings, list(rows), title=caption).html(key))
    # A scrolling box must be focusable with the keyboard, and then needs a name.
    return tag("div", inside, class_="scroll", tabindex="0", role="region", aria_labelledby=f"{key}-caption")
