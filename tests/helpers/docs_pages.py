"""Code of Markdown pages: its blocks with their place, and the commands in it."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from types import CodeType

ROOT = Path(__file__).parents[2]
# A fence may be indented, as in a list. A comment right before it may say why it is not run.
FENCE = re.compile(
    r"^(?:<!-- not run: (?P<reason>.*?) -->\n\s*)?"
    r"(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
# In a line of text: a command with options. One that ends in an option may only name it, without the value it takes.
INLINE = re.compile(r"`(dcnet [^`]* --[^`]* [^-`][^` ]*)`")
# The first line of a block that needs what the block right above it, or the first one of its page, has made.
CONTINUES, CONTINUES_FIRST = "# continues the code above\n", "# continues the first block of this page\n"
ENDS = (">", ">>", "|", "&&", ";")


@dataclass(frozen=True)
class Block:
    """Code of one language, the line of the page on which it begins, and why it is not run if it is not."""

    page: Path
    language: str
    code: str
    line: int
    reason: str | None

    def compiled(self, code: str) -> CodeType:
        """This code, whose errors then name the lines of the page."""
        return compile("\n" * (self.line - 1) + code, str(self.page), "exec")


def pages() -> list[Path]:
    """All pages of the docs."""
    return sorted((ROOT / "docs").rglob("*.md"))


def blocks(page: Path, language: str) -> list[Block]:
    """The blocks of a language, those that are not run among them."""
    text = page.read_text()
    return [
        Block(page, language, dedent(found["code"]), text[: found.start("code")].count("\n") + 1, found["reason"])
        for found in FENCE.finditer(text)
        if found["language"] == language
    ]


def pasted(page: Path) -> list[list[Block]]:
    """The blocks of Python that are run: each by itself, or after those before it where it continues their code."""
    groups: list[list[Block]] = []
    for block in blocks(page, "python"):
        if block.code.startswith((CONTINUES, CONTINUES_FIRST)):
            groups[-1 if block.code.startswith(CONTINUES) else 0].append(block)
        else:
            groups.append([block])
    return [[block for block in group if block.reason is None] for group in groups]


def languages(page: Path) -> set[str]:
    """Those of all blocks."""
    return {found["language"] for found in FENCE.finditer(page.read_text())}


def commands(page: Path) -> list[list[str]]:
    """The words after `dcnet` of its commands: all in blocks of bash, and those with options in lines of text."""
    lines = [line for block in blocks(page, "bash") for line in block.code.replace("\\\n", " ").splitlines()]
    # Three dots stand for what a reader would write there.
    lines += [line for line in INLINE.findall(page.read_text()) if "..." not in line]
    return [words for line in lines for words in _commands(shlex.split(line, comments=True))]


def _commands(words: list[str]) -> list[list[str]]:
    """The commands of one line, each as what follows its `dcnet` up to where the shell ends it."""
    starts = [i + 1 for i, word in enumerate(words) if _is_dcnet(word) and (i == 0 or _runs(words[i - 1]))]
    return [words[start : next((i for i in range(start, len(words)) if words[i] in ENDS), None)] for start in starts]


def _is_dcnet(word: str) -> bool:
    return word in ("dcnet", ".venv/bin/dcnet")


def _runs(before: str) -> bool:
    """Whether a command begins after this word: `&& dcnet`, `-m dcnet`, `RUNS=x dcnet`."""
    return before in (*ENDS, "-m") or "=" in before
