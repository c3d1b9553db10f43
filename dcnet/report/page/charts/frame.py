"""What all charts have: a frame with marks, words, a legend, and a name for those who cannot see it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dcnet.report.page.charts.scales import Scale, spelled
from dcnet.report.page.markup import Html, join, tag

# As on a phone: on a wider page the chart grows, and its words with it.
WIDTH, HEIGHT = 420, 290
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 12, 46
COLORS = 10
# The radius of a point.
DOT = 3


@dataclass(frozen=True)
class Axis:
    """What it is called, where it begins and ends, and whether it goes by powers of ten."""

    name: str
    low: float
    high: float
    log: bool = False
    marks: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True)
class Words:
    """The key, which must be unique on the page, the title of the chart, and a sentence about what it shows."""

    key: str
    title: str
    about: str = ""


def scales(x: Axis, y: Axis) -> tuple[Scale, Scale]:
    """From values to places in the frame."""
    across = Scale(x.low, x.high, LEFT, WIDTH - RIGHT, x.log)
    return across, Scale(y.low, y.high, HEIGHT - BOTTOM, TOP, y.log)


def frame(x: Axis, y: Axis) -> Html:
    """Grid, marks and the names of the axes."""
    across, up = scales(x, y)
    parts = [_mark_x(across(at), text) for at, text in x.marks or _marks(across)]
    parts += [_mark_y(up(at), text) for at, text in y.marks or _marks(up)]
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(tag("text", x.name, x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT - 8, text_anchor="middle"))
    parts.append(tag("text", y.name, transform=f"translate(14 {middle}) rotate(-90)", text_anchor="middle"))
    return tag("g", *parts, class_="frame", aria_hidden="true")


def _marks(scale: Scale) -> list[tuple[float, str]]:
    return [(value, spelled(value)) for value in scale.marks()]


def _mark_x(place: float, text: str) -> Html:
    line = tag("line", x1=_short(place), x2=_short(place), y1=TOP, y2=HEIGHT - BOTTOM)
    return join([line, tag("text", text, x=_short(place), y=HEIGHT - BOTTOM + 17, text_anchor="middle")])


def _mark_y(place: float, text: str) -> Html:
    line = tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=_short(place), y2=_short(place))
    return join([line, tag("text", text, x=LEFT - 6, y=_short(place + 4.5), text_anchor="end")])


def _short(place: float) -> str:
    return f"{place:.1f}"


def canvas(words: Words, *children: str, height: float = HEIGHT, **attributes: str) -> Html:
    """The picture itself, with its title for those who cannot see it."""
    title = tag("title", f"{words.title}. {words.about}".strip(), id=f"{words.key}-title")
    box = f"0 0 {WIDTH} {height:g}"
    about = {"role": "img", "aria_labelledby": f"{words.key}-title", "id": f"{words.key}-chart"}
    return tag("svg", title, *children, viewBox=box, class_="chart", **about, **attributes)


def clip(words: Words) -> Html:
    """The inside of the frame, which lines must not leave, with room for a dot on its edge."""
    width, height = WIDTH - LEFT - RIGHT + 2 * DOT, HEIGHT - TOP - BOTTOM + 2 * DOT
    inside = tag("rect", x=LEFT - DOT, y=TOP - DOT, width=width, height=height)
    return tag("clipPath", inside, id=f"{words.key}-clip")


def color(i: int, dashed: bool = False) -> str:
    """The classes of the i-th series: a colour, and dashes if it is to have some or the colours have been used up."""
    return f"s{i % COLORS}" + (f" d{i // COLORS % 3}" if dashed or i >= COLORS else "")


def legend(words: Words, names: Sequence[str], shown: int | None = None, dashed: Collection[int] = ()) -> Html:
    """A button for each series, which hides it and shows it again; those from `shown` on begin hidden."""
    buttons = []
    for i, name in enumerate(names):
        pressed = "true" if shown is None or i < shown else "false"
        line = tag("line", x1=0, x2=22, y1=5, y2=5)
        swatch = tag("svg", line, viewBox="0 0 22 10", class_=f"swatch {color(i, i in dashed)}", aria_hidden="true")
        about = {"aria_pressed": pressed, "aria_controls": f"{words.key}-chart", "data_series": str(i)}
        buttons.append(tag("li", tag("button", swatch, name, type="button", **about)))
    return tag("ul", *buttons, class_="legend", aria_label=f"Series of: {words.title}")


def figure(words: Words, *children: str, **attributes: str) -> Html:
    """The chart with its title above and the rest below."""
    caption = tag("figcaption", tag("strong", words.title), f" {words.about}" if words.about else "")
    return tag("figure", caption, *children, id=words.key, **attributes)
