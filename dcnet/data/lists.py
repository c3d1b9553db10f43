"""Files with one thing on each line, and what is wrong with a line."""

from pathlib import Path


def numbered_lines(file: Path) -> list[tuple[int, str]]:
    """The lines of a file that are not empty, with their numbers from 1."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read as a list: {error}") from None
    return [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]


def bad_line(file: Path, number: int, text: str, expected: str) -> ValueError:
    """The error for a line that is not as it should be."""
    return ValueError(f"{file}, line {number}: {text!r}: expected {expected}")
