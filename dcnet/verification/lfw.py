"""Labeled Faces in the Wild: its lists of pairs."""

from dataclasses import dataclass
from pathlib import Path

from dcnet.data.lfw import FOLDERS
from dcnet.data.lfw_files import LfwFiles, is_number
from dcnet.data.lists import bad_line, numbered_lines
from dcnet.verification.pairs import Pairs

HEADER = "folds and pairs, such as '10<tab>300', or a number of pairs, such as '500'"
SAME = "a pair of one person: name<tab>number<tab>number"
DIFFERENT = "a pair of two people: name<tab>number<tab>name<tab>number"
Row = tuple[str, str, bool]


@dataclass(frozen=True)
class LfwData(LfwFiles):
    """LFW in its own layout, as `LfwFiles`, with its lists of pairs."""

    @classmethod
    def found_in(cls, folder: Path | str, name: str = "pairs") -> "LfwData":
        """The folder itself, or one in it that is called as LFW's are, as in training; of several one with the list."""
        folder = Path(folder)
        inside = [folder / own for own in FOLDERS if (folder / own).is_dir()]
        found = [cls(root) for root in inside or [folder]]
        return next((data for data in found if data.has_list(name)), found[0])

    def has_list(self, name: str) -> bool:
        try:
            return self.list_file(name).is_file()
        except ValueError:
            return False

    def pairs(self, name: str = "pairs") -> Pairs:
        """The pairs of a list, such as "pairs" with its ten folds, or "pairsDevTest" with none."""
        file = self.list_file(name)
        (number, header), *lines = numbered_lines(file) or [(1, "")]
        folds, count = _header(file, number, header)
        total = 2 * count * (folds or 1)
        if len(lines) != total:
            raise ValueError(f"{file} has {len(lines)} pairs: expected {total}, as its first line says, {header!r}")
        rows = [self._pair(file, line, at % (2 * count) < count) for at, line in enumerate(lines)]
        return Pairs.of_names(rows, [at // (2 * count) for at in range(total)] if folds else None)

    def _pair(self, file: Path, line: tuple[int, str], same: bool) -> Row:
        number, text = line
        parts = text.split()
        # Of one person there are name, number, number; of two, name, number, name, number.
        images = [parts[:2], [parts[0], *parts[2:]]] if same else [parts[:2], parts[2:]]
        right = len(parts) == (3 if same else 4) and all(is_number(of[1]) for of in images)
        if not right or images[0] == images[1] or (not same and images[0][0] == images[1][0]):
            raise bad_line(file, number, text, SAME if same else DIFFERENT)
        first, second = (self.image_of(file, line, of[0], int(of[1])) for of in images)
        return first, second, same


def _header(file: Path, number: int, text: str) -> tuple[int, int]:
    """Folds, or 0 for none, and the pairs of each kind in each."""
    parts = text.split()
    if len(parts) not in (1, 2) or not all(is_number(part) for part in parts):
        raise bad_line(file, number, text, HEADER)
    return (0, int(parts[0])) if len(parts) == 1 else (int(parts[0]), int(parts[1]))
