"""A strict HTML parser: every element must be closed, and void elements must be empty."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

# Without a closing slash, a browser would parse the following markup as their content.
SHAPES = {"line", "rect", "path", "circle"}
EMPTY = {"meta", "link", "input"} | SHAPES


@dataclass
class Node:
    name: str
    attributes: dict[str, str | None] = field(default_factory=dict)
    children: list["Node | str"] = field(default_factory=list)

    def all(self, name: str | None = None, **attributes: str) -> list["Node"]:
        """The descendants with the name, classes and attributes."""
        return [node for node in self.walk() if node.fits(name, attributes)]

    def one(self, name: str | None = None, **attributes: str) -> "Node":
        (found,) = self.all(name, **attributes)
        return found

    def fits(self, name: str | None, attributes: dict[str, str]) -> bool:
        if name is not None and self.name != name:
            return False
        return all(wanted in (self.attributes.get(key.rstrip("_")) or "").split() for key, wanted in attributes.items())

    def walk(self) -> Iterator["Node"]:
        for child in self.children:
            if isinstance(child, Node):
                yield child
                yield from child.walk()

    @property
    def text(self) -> str:
        parts = [child if isinstance(child, str) else child.text for child in self.children]
        return " ".join(" ".join(parts).split())


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.root = Node("document")
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in SHAPES, f"{tag} is not closed"
        node = Node(tag, dict(attrs))
        assert len(node.attributes) == len(attrs), f"{tag} has an attribute twice"
        self.open[-1].children.append(node)
        if tag not in EMPTY:
            self.open.append(node)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in EMPTY, f"{tag} cannot be closed so"
        self.open[-1].children.append(Node(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().name == tag

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def read(text: str) -> Node:
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == [reader.root]
    return reader.root
