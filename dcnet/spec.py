"""The spec grammar: `mag(key=value,...)[&mag...]-angle(...)[+weighting]`."""

import ast
import dataclasses
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dcnet.learnable import Learnable
from dcnet.radius import Radius

GRAMMAR = "magnitude(key=value,...)[&magnitude...]-angle(...)[+weighting]"

# More than any operator, margin or attack needs; what is longer takes long to read, and is no mistake of a person.
LONGEST = 5000
# How much of a long one a message repeats.
SHOWN = 200

_TOKEN = re.compile(r"\s*([A-Za-z_]\w*|[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[()=,&+-])")
_WORDS = {"True": True, "true": True, "False": False, "false": False}
_CALLS = {"radius": Radius, "learnable": Learnable}


def unknown(kind: str, name: object, known: Iterable[str]) -> ValueError:
    """The error for a name that is not in a registry, be it a string or not: the known ones, and the nearest."""
    names, text = list(known), str(name)
    same_start = [other for other in names if text.startswith(other) or (text and other.startswith(text))]
    near = same_start or difflib.get_close_matches(text.lower(), names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ValueError(f"unknown {kind} {shown(name)}: known are {', '.join(names)}{hint}")


def check_length(spec: str) -> None:
    """Refuses a spec that is longer than any could be."""
    if len(spec) > LONGEST:
        raise ValueError(f"a spec must have at most {LONGEST} characters, not {len(spec)}: {shown(spec)}")


def shown(text: object) -> str:
    """What was given, for a message: in quotes, and its beginning where it is long."""
    found = text if isinstance(text, str) else repr(text)
    cut = found if len(found) <= SHOWN else found[:SHOWN]
    return (repr(cut) if isinstance(text, str) else cut) + "..." * (cut is not found)


def made_by(registry: Mapping[str, Any], kind: str, spec: str) -> Any:
    """The object of a spec such as `arcface(m=0.3)` or `pgd(epsilon=8/255)`, by the dataclass of that name."""
    check_length(spec)
    name, opened, text = spec.partition("(")
    if name not in registry:
        raise unknown(kind, name, registry)
    given = _settings(registry[name], name, kind, spec, text) if opened else {}
    try:
        return registry[name](**given)
    except (TypeError, OverflowError) as error:
        # What is typed in is told as any other wrong value is.
        raise ValueError(f"{shown(spec)} is no {kind}: {error}") from error


def _settings(made: Any, name: str, kind: str, spec: str, text: str) -> dict[str, Any]:
    """The values between the parentheses of a spec."""
    known = {declared.name for declared in dataclasses.fields(made) if declared.init}
    try:
        call = ast.parse(f"f({text}", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise ValueError(text)
        found = [(str(word.arg), _literal(word.value)) for word in call.keywords]
    except (SyntaxError, TypeError, ValueError, ArithmeticError, RecursionError, MemoryError):
        raise ValueError(f"{shown(spec)} is no {kind}: write it as {name} or {name}(name=number,...)") from None
    names = [key for key, _ in found]
    if strange := sorted(set(names) - known):
        raise ValueError(
            f"{name} has no {shown(strange[0])} in {shown(spec)}: it has {', '.join(sorted(known)) or 'nothing'}"
        )
    if twice := [key for key in names if names.count(key) > 1]:
        raise ValueError(
            f"{twice[0]!r} of {name} is given {names.count(twice[0])} times in {shown(spec)}: give it once"
        )
    return dict(found)


def _literal(node: ast.expr) -> Any:
    """The value of a literal, or of one divided by another, as epsilons are written."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        over, under = (ast.literal_eval(part) for part in (node.left, node.right))
        if not all(isinstance(part, int | float) for part in (over, under)):
            raise ValueError("only numbers can be divided")
        return over / under
    return ast.literal_eval(node)


class Spec:
    """A cursor over the tokens of one spec."""

    def __init__(self, text: str):
        check_length(text)
        self.text = text
        self.tokens = self._split(text)
        self.at = 0
        # The Radius or Learnable whose values are read, which hold no other.
        self.inside = ""

    def _split(self, text: str) -> list[str]:
        tokens, position = [], 0
        while position < len(text.rstrip()):
            match = _TOKEN.match(text, position)
            if match is None:
                raise self.error(f"{text[position:].strip()[0]!r} is not understood")
            tokens.append(match[1])
            position = match.end()
        return tokens

    def error(self, why: str) -> ValueError:
        return ValueError(f"operator spec {shown(self.text)} does not parse: {why}; write {GRAMMAR}")

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, expected: str = "") -> str:
        token = self.peek()
        if not token or (expected and token != expected):
            raise self.error(f"expected {expected or 'a name'!r}, found {token or 'the end'!r}")
        self.at += 1
        return token

    def skip(self, token: str) -> bool:
        found = self.peek() == token
        self.at += found
        return found

    def word(self, what: str) -> str:
        if not self.peek().isidentifier():
            raise self.error(f"expected {what}, found {self.peek() or 'the end'!r}")
        return self.take()

    def call(self, registry: Mapping[str, Any], kind: str) -> Any:
        """`name` or `name(key=value,...)`, made into an object by the registry's class."""
        name = self.word(f"the name of {kind}")
        if name not in registry:
            raise unknown(kind.split()[-1], name, registry)
        return self.build(registry[name], name)

    def build(self, made: Any, name: str) -> Any:
        known = [declared.name for declared in dataclasses.fields(made)]
        given: dict[str, Any] = {}
        for key, value in self.arguments():
            if key not in known:
                raise self.error(f"{name} has no {key!r}, only {', '.join(known)}")
            if key in given:
                raise self.error(f"{key!r} of {name} is given twice")
            given[key] = value
        return made(**given)

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
        token = self.take()
        if token in _WORDS:
            return _WORDS[token]
        if token.lower() in _CALLS:
            if self.inside:
                raise self.error(f"{key!r} of {self.inside} must be a number, True or False, not {token}(...)")
            self.inside = token
            built = self.build(_CALLS[token.lower()], token)
            self.inside = ""
            return built
        try:
            return float(token) if re.search(r"[.eE]", token) else int(token)
        except ValueError:
            raise self.error(f"{shown(token)} is not a number, True, False, Radius(...) or Learnable(...)") from None

    def end(self) -> None:
        if self.peek():
            raise self.error(f"{self.peek()!r} is left over")
