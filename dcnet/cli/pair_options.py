"""Options that name pairs of images, and what is wrong with them in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

if TYPE_CHECKING:
    from dcnet.verification import Pairs

OPTIONAL = "(optional)"
LFW_LIST = "pairs"


@dataclass(frozen=True)
class Listed:
    """Pairs of files below a folder, what is to be said of them, and which they are, as plain values."""

    pairs: Pairs
    root: Path
    about: dict[str, Any]

    @property
    def name(self) -> str:
        """What a record calls a report on them, such as lfw-pairs-unseen."""
        return self.about["name"]

    @property
    def paths(self) -> list[Path]:
        return [self.root / name for name in self.pairs.names]


@dataclass(frozen=True, kw_only=True)
class PairOptions:
    """A list of pairs, and where its images are."""

    pairs: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint=OPTIONAL)] = None
    """A list of pairs: on each line two paths, and 1 or same, or 0 or different."""

    images: Annotated[
        Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="(default: that of the list)")
    ] = None
    """Where the paths of --pairs begin."""

    lfw: Annotated[
        Path | None, tyro.conf.arg(metavar="FOLDER", aliases=["--data-dir"], help_behavior_hint=OPTIONAL)
    ] = None
    """Pairs of LFW, in place of --pairs: a folder with Person/Person_0001.jpg, or one in which that is called
    lfw-deepfunneled, lfw_funneled or lfw, with the lists in it or beside it."""

    lfw_list: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: pairs)")] = None
    """The list of LFW: pairs, pairsDevTrain or pairsDevTest."""

    unseen: bool = False
    """Leave out pairs with an image in a folder that is called as a class the run was trained on."""

    def check_pairs(self) -> None:
        """Refuses options that do not go together."""
        if self.pairs is not None and self.lfw is not None:
            raise ValueError("--pairs and --lfw both name pairs: give one of them")
        for option, value, other, wanted in (
            ("--images", self.images, "--pairs", self.pairs),
            ("--lfw-list", self.lfw_list, "--lfw", self.lfw),
        ):
            if value is not None and wanted is None:
                raise ValueError(f"{option} goes with {other}, which is not given")
        if self.images is not None and not self.images.is_dir():
            raise ValueError(f"--images is {str(self.images)!r}, which is no folder: give one that has the images")

    @property
    def listed(self) -> bool:
        return self.pairs is not None or self.lfw is not None

    def read(self, classes: Sequence[str]) -> Listed:
        """The pairs, of both kinds, and a note where they have classes that were trained on."""
        from dcnet.verification import people_disjoint

        pairs, root, name, file = self._read()
        kept = people_disjoint(pairs, classes).pairs if self.unseen else pairs
        known = 0 if self.unseen else _known(pairs, classes)
        same = int(kept.same.sum())
        if same in (0, len(kept)):
            kind = "the same" if same == 0 else "different"
            raise ValueError(f"{name} has no pair that is {kind}, of {len(kept):,} pairs: both kinds are needed")
        of = f"{known:,} of {len(pairs):,} pairs"
        about = {
            "name": self._short_name(),
            "list": name,
            "list_file": str(file.resolve()),
            "images": str(root.resolve()),
            "files": len(kept.names),
            "pairs": len(kept),
            "same": same,
            "different": len(kept) - same,
            "left_out": len(pairs) - len(kept),
            "notes": [f"{of} show a class that the run was trained on, which is easier: see --unseen"] if known else [],
        }
        return Listed(kept, root, about)

    def _short_name(self) -> str:
        of = f"lfw-{self.lfw_list or LFW_LIST}" if self.pairs is None else f"pairs-{self.pairs.stem}"
        return of.removesuffix(".txt") + ("-unseen" if self.unseen else "")

    def _read(self) -> tuple[Pairs, Path, str, Path]:
        """The pairs, where their images are, what the list is called, and its file."""
        from dcnet.verification import LfwData, read_pairs

        if self.lfw is not None:
            name = self.lfw_list or LFW_LIST
            data = LfwData.found_in(self.lfw, name)
            return data.pairs(name), data.root, f"LFW {name}", data.list_file(name)
        assert self.pairs is not None
        root = self.pairs.parent if self.images is None else self.images
        return read_pairs(self.pairs, root), root, str(self.pairs), self.pairs


def _known(pairs: Pairs, classes: Sequence[str]) -> int:
    """How many pairs have an image in a folder that is called as one of the classes."""
    from dcnet.verification.pairs import folder_of

    trained = {at for at, name in enumerate(pairs.names) if folder_of(name) in classes}
    both = zip(pairs.first.tolist(), pairs.second.tolist(), strict=True)
    return sum(first in trained or second in trained for first, second in both)
