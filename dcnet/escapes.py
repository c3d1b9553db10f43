"""Text from files as terminals and pictures may show it, with nothing in it that steers them."""

import unicodedata

# Control characters, those that turn the direction of writing or cannot be seen, halves of characters, and the
# separators of lines.
STEERING = ("Cc", "Cf", "Cs", "Zl", "Zp")


def visible(text: object, kept: str = "") -> str:
    r"""The text with escapes such as \x1b in place of what would steer a terminal, but for the characters in `kept`."""
    return "".join(sign if sign in kept or _plain(sign) else _spelled(sign) for sign in str(text))


def _plain(sign: str) -> bool:
    return sign.isprintable() or unicodedata.category(sign) not in STEERING


def _spelled(sign: str) -> str:
    return sign.encode("unicode_escape", "backslashreplace").decode("ascii")


def literal(text: str) -> str:
    """The text for a picture of matplotlib's, which takes what is between two dollars for an equation."""
    return text.replace("$", r"\$")
