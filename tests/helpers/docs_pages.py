"""Code blocks and commands of Markdown pages."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from types import CodeType

ROOT = Path(__file__).parents[2]
# A fence may be indented, as in a list. A comment before it may say why the block is not run.
FENCE = re.compile(
    r"^(?:<!-- not run: (?P<reason>.*?) -->\n\s*)?"
    r"(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
# A command with options in a line of text. If it ends with an option, the value may be missing, so it is not matched.
INLINE = re.compile(r"`(dcnet [^`]* --[^`]* [^-`][^` ]*)`")
# The first lines of blocks that continue the block above, or the first block of the page.
CONTINUES, CONTINUES_FIRST = "# continues the code above\n", "# continues the first block of this page\n"
ENDS = (">", ">>", "|", "&&", ";")


@dataclass(frozen=True)
class Block:
    """A code block: its page, language and first line, and the reason if it is not run."""

    page: Path
    language: str
    code: str
    line: int
    reason: str | None

    def compiled(self, code: str) -> CodeType:
        """Compiles code such that errors show the lines of the page."""
        return compile("\n" * (self.line - 1) + code, str(self.page), "exec")


def pages() -> list[Path]:
    """All docs pages."""
    return sorted((ROOT / "docs").rglob("*.md"))


def blocks(page: Path, language: str) -> list[Block]:
    """The blocks of a language, including those that are not run."""
    text = page.read_text()
    return [
        Block(page, language, dedent(found["code"]), text[: found.start("code")].count("\n") + 1, found["reason"])
        for found in FENCE.finditer(text)
        if found["language"] == language
    ]


def pasted(page: Path) -> list[list[Block]]:
    """The Python blocks to run, in groups: a block, and the blocks that continue it."""
    groups: list[list[Block]] = []
    for block in blocks(page, "python"):
        if block.code.startswith((CONTINUES, CONTINUES_FIRST)):
            groups[-1 if block.code.startswith(CONTINUES) else 0].append(block)
        else:
            groups.append([block])
    return [[block for block in group if block.reason is None] for group in groups]


def languages(page: Path) -> set[str]:
    """The languages of all blocks."""
    return {found["language"] for found in FENCE.finditer(page.read_text())}


def commands(page: Path) -> list[list[str]]:
    """The arguments of `dcnet` commands: of all commands in bash blocks, and of those with options in text."""
    lines = [line for block in blocks(page, "bash") for line in block.code.replace("\\\n", " ").splitlines()]
    # "..." stands for arguments of the reader.
    lines += [line for line in INLINE.findall(page.read_text()) if "..." not in line]
    return [words for line in lines for words in _commands(shlex.split(line, comments=True))]


def _commands(words: list[str]) -> list[list[str]]:
    """The arguments of each `dcnet` command in one line, up to its end."""
    starts = [i + 1 for i, word in enumerate(words) if _is_dcnet(word) and (i == 0 or _runs(words[i - 1]))]
    return [words[start : next((i for i in range(start, len(words)) if words[i] in ENDS), None)] for start in starts]


def _is_dcnet(word: str) -> bool:
    return word in ("dcnet", ".venv/bin/dcnet")


def _runs(before: str) -> bool:
    """Whether a command starts after this word: `&& dcnet`, `-m dcnet`, `RUNS=x dcnet`."""
    return before in (*ENDS, "-m") or "=" in before
