"""Parses and writes `name(key=value,...)`, the parts of specs of operators, margins and adversaries."""

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

from dcnet.parameters import Learnable, Radius
from dcnet.registry import Registry, quote

# Longer than any operator, margin or adversary. A longer text takes long to parse.
LONGEST = 5000

_TOKEN = re.compile(
    r"""\s*([A-Za-z_]\w*|[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[()=,&+/-]|'[^']*'|"[^"]*")""", re.ASCII
)
_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None}
_NESTED = {"radius": Radius, "learnable": Learnable}


def parse_call(text: str, registry: Registry[Any]) -> Any:
    """The object of a spec such as `arcface(m=0.3)` or `pgd(epsilon=8/255)`, built by the dataclass of that name."""
    name = text.partition("(")[0]
    kind = registry.kind.split(" ", 1)[-1]
    check_length(text)
    made = registry[name]
    reader = SpecReader(text, kind, f"{quote(name)} or {name}(name=number,...)", start=len(name))
    built = reader.build(made, name)
    reader.end()
    return built


def format_call(value: Any, name: str, write: Callable[[Any], str] = repr) -> str:
    """`name(key=value,...)` with the fields that differ from their defaults; `parse_call` reads it back."""
    changed = [
        f"{declared.name}={_format_value(getattr(value, declared.name), write)}"
        for declared in dataclasses.fields(value)
        if getattr(value, declared.name) != declared.default
    ]
    return f"{name}({','.join(changed)})" if changed else name


def _format_value(value: Any, write: Callable[[Any], str]) -> str:
    if not isinstance(value, Radius | Learnable):
        return write(value)
    call = format_call(value, type(value).__name__)
    return call if call.endswith(")") else f"{call}()"


def check_length(text: str) -> None:
    if len(text) > LONGEST:
        raise ValueError(f"a spec must have at most {LONGEST} characters, not {len(text)}: {quote(text)}")


class SpecReader:
    """A cursor over the tokens of a spec.

    Args:
        text: the whole spec.
        kind: what the spec describes, such as "operator", for error messages.
        grammar: how to write one, for error messages.
        start: the position in the text to start at.
    """

    def __init__(self, text: str, kind: str, grammar: str, start: int = 0):
        check_length(text)
        self.text, self.kind, self.grammar = text, kind, grammar
        self.tokens = self._split(text, start)
        self.position = 0
        # The Radius or Learnable that is being read; neither contains another.
        self.inside = ""

    def _split(self, text: str, start: int) -> list[str]:
        tokens, end = [], len(text.rstrip())
        while start < end:
            match = _TOKEN.match(text, start)
            if match is None:
                raise self.error(f"unexpected {text[start:].strip()[0]!r}")
            tokens.append(match[1])
            start = match.end()
        return tokens

    def error(self, why: str) -> ValueError:
        return ValueError(f"invalid {self.kind} {quote(self.text)}: {why}; write {self.grammar}")

    def peek(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def take(self, expected: str = "") -> str:
        token = self.peek()
        if not token or (expected and token != expected):
            raise self.error(f"expected {expected or 'a value'!r}, found {repr(token) if token else 'the end'}")
        self.position += 1
        return token

    def skip(self, token: str) -> bool:
        """Takes the token if it is the next one."""
        found = self.peek() == token
        self.position += found
        return found

    def word(self, what: str) -> str:
        if not self.peek().isidentifier():
            raise self.error(f"expected {what}, found {repr(self.peek()) if self.peek() else 'the end'}")
        return self.take()

    def call(self, registry: Registry[Any]) -> Any:
        """`name` or `name(key=value,...)`, as an object of the registry's class."""
        name = self.word(f"the name of {registry.kind}")
        return self.build(registry[name], name)

    def build(self, made: Any, name: str) -> Any:
        """Builds an object of the dataclass `made` from the values in parentheses that follow."""
        known = [declared.name for declared in dataclasses.fields(made) if declared.init]
        given: dict[str, Any] = {}
        for key, value in self.arguments():
            if key not in known:
                raise self.error(f"{name} has no {quote(key)}, only {', '.join(known) or 'a name'}")
            if key in given:
                raise self.error(f"{key!r} of {name} is given twice")
            given[key] = value
        try:
            return made(**given)
        except (TypeError, OverflowError) as error:
            # In a spec, a wrong type is a wrong value.
            raise ValueError(f"invalid {self.kind} {quote(self.text)}: {error}") from error

    def arguments(self) -> Iterator[tuple[str, Any]]:
        """The `key=value` pairs in parentheses, if there are any."""
        if not self.skip("("):
            return
        while not self.skip(")"):
            key = self.word("the name of a value")
            self.take("=")
            yield key, self.value(key)
            if self.peek() != ")":
                self.take(",")

    def value(self, key: str) -> Any:
        """A number, a quotient of two as in 8/255, True, False, None, a string, Radius(...) or Learnable(...)."""
        token = self.take()
        if token in _WORDS:
            return _WORDS[token]
        if token.lower() in _NESTED:
            return self._nested(key, token)
        if token[0] in "'\"":
            return token[1:-1]
        number = self._number(token)
        if not self.skip("/"):
            return number
        try:
            return number / self._number(self.take())
        except ArithmeticError as error:
            raise self.error(f"cannot compute {key!r} from {quote(token)}/...: {error}") from None

    def _nested(self, key: str, name: str) -> Any:
        if self.inside:
            raise self.error(f"{key!r} of {self.inside} must be a number, True or False, not {name}(...)")
        self.inside = name
        built = self.build(_NESTED[name.lower()], name)
        self.inside = ""
        return built

    def _number(self, token: str) -> float:
        try:
            return float(token) if re.search(r"[.eE]", token) else int(token)
        except ValueError:
            raise self.error(
                f"{quote(token)} is not a finite number, True, False, Radius(...) or Learnable(...)"
            ) from None

    def end(self) -> None:
        if self.peek():
            raise self.error(f"unexpected {self.peek()!r} at the end")
