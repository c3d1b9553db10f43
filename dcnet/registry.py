"""Registries of named entries, which the package and its users can extend."""

import difflib
import importlib
import pkgutil
import threading
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, TypeVar

# Error messages quote this many characters of a longer value.
QUOTED = 200

Entry = TypeVar("Entry")
Added = TypeVar("Added")


class UnknownNameError(ValueError, KeyError):
    """A name that is not in a registry."""

    # KeyError would show the message in quotes.
    __str__ = Exception.__str__


def quote(value: object) -> str:
    """A value for an error message: in quotes if it is a string, and shortened if it is long."""
    text = value if isinstance(value, str) else repr(value)
    cut = text[:QUOTED]
    return (repr(cut) if isinstance(value, str) else cut) + ("..." if len(text) > QUOTED else "")


def unknown_name(kind: str, name: object, known: Iterable[str], aliases: Iterable[str] = ()) -> UnknownNameError:
    """The error for a name that is not among the known ones, with the nearest of them or of their aliases."""
    names, text = list(known), str(name)
    all_names = [*names, *aliases]
    same_start = [other for other in all_names if text.startswith(other) or (text and other.startswith(text))]
    near = same_start or difflib.get_close_matches(text.lower(), all_names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return UnknownNameError(f"unknown {kind} {quote(name)}: known are {', '.join(names)}{hint}")


class Registry(MutableMapping[str, Entry]):
    """A mapping from names to entries, in the order in which they were added.

    `registry[name]` raises an error with the nearest name if there is no such entry. `add` and `register` reject a name
    that is taken; assigning to `registry[name]` replaces the entry.

    Args:
        kind: what an entry is, with its article, for error messages: "a magnitude".
        discover: a package whose modules are imported before the first lookup, since they register entries.
        identifiers: require names that are Python identifiers.
        normalize: names with the same normal form are the same name, such as str.lower.
        extra: more names to list in the error for an unknown name.
    """

    def __init__(
        self,
        kind: str,
        *,
        discover: str | None = None,
        identifiers: bool = False,
        normalize: Callable[[str], str] | None = None,
        extra: Callable[[], Iterable[str]] = tuple,
    ):
        self.kind = kind
        self.aliases: dict[str, str] = {}
        self._discover, self._importing = discover, set[int]()
        self._identifiers, self._normalize, self._extra = identifiers, normalize, extra
        self._entries: dict[str, Entry] = {}
        # How often entries were added, replaced or removed.
        self.changes = 0

    def add(self, name: str, entry: Added, aliases: Iterable[str] = (), module: str = "") -> Added:
        """Adds an entry, or raises ValueError if one of its names is taken. Returns the entry.

        Args:
            name: the name of the entry.
            entry: any value.
            aliases: its other names.
            module: the module that adds it; one outside of `discover` may not take a name of that package.
        """
        if module and not f"{module}.".startswith(f"{self._discover}."):
            self._import_modules()
        if self._identifiers and not name.isidentifier():
            raise ValueError(f"the name of {self.kind} must be one word of letters, digits and _, not {name!r}")
        aliases = tuple(aliases)
        for each in (name, *aliases):
            found = self._find(each)
            if found is not None:
                owner: Any = self._entries[found]
                owner = getattr(owner, "__name__", type(owner).__name__)
                raise ValueError(f"{each!r} is taken: {owner} is {self.kind} of that name")
        self[name] = entry  # type: ignore[assignment]
        self.aliases.update(dict.fromkeys(aliases, name))
        return entry

    def register(self, entry: Added) -> Added:
        """A decorator that adds a class by its `name` and its own `aliases`, or a function by its __name__."""
        named: Any = entry
        aliases = vars(named).get("aliases", ()) if isinstance(entry, type) else ()
        return self.add(getattr(named, "name", None) or named.__name__, entry, aliases, named.__module__)

    def canonical(self, name: object) -> str:
        """The registered name for a name, an alias or another spelling of it."""
        self._import_modules()
        found = self._find(name)
        if found is None:
            known = [*self._entries, *self._extra()]
            raise unknown_name(self.kind.split(" ", 1)[-1], name, known, self.aliases)
        return found

    def aliases_of(self, name: str) -> list[str]:
        return [alias for alias, meant in self.aliases.items() if meant == name]

    def __getitem__(self, name: str) -> Entry:
        return self._entries[self.canonical(name)]

    def __contains__(self, name: object) -> bool:
        # Mapping's would look for near names, which takes long.
        self._import_modules()
        return self._find(name) is not None

    def __setitem__(self, name: str, entry: Entry) -> None:
        self._entries[name] = entry
        self.changes += 1

    def __delitem__(self, name: str) -> None:
        del self._entries[name]
        self.changes += 1
        for alias in self.aliases_of(name):
            del self.aliases[alias]

    def __iter__(self) -> Iterator[str]:
        self._import_modules()
        return iter(self._entries)

    def __len__(self) -> int:
        self._import_modules()
        return len(self._entries)

    def __repr__(self) -> str:
        return f"Registry({self.kind!r}: {', '.join(self)})"

    def _find(self, name: object) -> str | None:
        if not isinstance(name, str):
            return None
        if name in self._entries or name in self.aliases:
            return self.aliases.get(name, name)
        if self._normalize is None:
            return None
        spellings = {self._normalize(known): known for known in self._entries}
        spellings |= {self._normalize(alias): meant for alias, meant in self.aliases.items()}
        return spellings.get(self._normalize(name))

    def _import_modules(self) -> None:
        # A module that is being imported may look an entry up; other threads wait for it in the import system.
        thread = threading.get_ident()
        if self._discover is None or thread in self._importing:
            return
        self._importing.add(thread)
        try:
            package = importlib.import_module(self._discover)
            for module in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{package.__name__}.{module.name}")
            self._discover = None
        finally:
            self._importing.discard(thread)
