"""Files with one thing on each line, and what is wrong with a line."""

from pathlib import Path

# A list of a million pairs has less.
LARGEST = 1 << 28
# Of a line, in an error.
SHOWN = 200


def numbered_lines(file: Path) -> list[tuple[int, str]]:
    """The lines of a file that are not empty, with their numbers from 1."""
    try:
        with file.open("rb") as opened:
            content = opened.read(LARGEST + 1)
        lines = content.decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read as a list: {error}") from None
    if len(content) > LARGEST:
        raise ValueError(f"{file} cannot be read as a list: it has more than {LARGEST:,} bytes")
    return [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]


def bad_line(file: Path, number: int, text: str, expected: str) -> ValueError:
    """The error for a line that is not as it should be."""
    shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
    return ValueError(f"{file}, line {number}: {shown!r}: expected {expected}")
