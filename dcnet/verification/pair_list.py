"""The pairs for `dcnet verify`: of a list, a folder of people or LFW, with a description for records."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dcnet.data.image_folder import image_names
from dcnet.verification.measures import count_pairs
from dcnet.verification.pairs import (
    LfwData,
    Pairs,
    folder_of,
    folder_pairs,
    labels_by_folder,
    people_disjoint,
    read_pairs,
)

LFW_LIST = "pairs"


@dataclass(frozen=True)
class PairList:
    """Pairs of image files.

    Args:
        pairs: the pairs, with the names of their files.
        root: the folder of the files.
        about: a description of the pairs, as plain values.
    """

    pairs: Pairs
    root: Path
    about: dict[str, Any]

    @property
    def paths(self) -> list[Path]:
        return [self.root / name for name in self.pairs.names]

    @property
    def people(self) -> Tensor | None:
        """The person or class of each image by its folder, integers; None if folders are not people."""
        return labels_by_folder(self.pairs)

    def __str__(self) -> str:
        about = self.about
        text = f"{about['pairs']:,} pairs, {about['same']:,} same and {about['different']:,} different, "
        left_out = f", without {about['left_out']:,} that show a training class" if about["left_out"] else ""
        people = f" ({about['files']:,} images of {about['people']:,} people)" if "people" in about else ""
        return f"{text}of {about['list']}{people}{left_out}"


def read_pair_list(
    classes: Sequence[str],
    file: Path | None = None,
    images: Path | None = None,
    lfw: Path | None = None,
    lfw_list: str | None = None,
    unseen: bool = False,
    people: Path | None = None,
) -> PairList:
    """Reads pairs, which must be of both kinds; notes if some pairs show training classes.

    Args:
        classes: the classes that the run was trained on.
        file: a list of pairs; None for a folder of people or a list of LFW.
        images: the folder of the images; None for the folder of the list.
        lfw: the folder of LFW.
        lfw_list: the list of LFW.
        unseen: leave out pairs with an image in a folder that has the name of a training class.
        people: a folder with one folder of images per person, for all pairs of its images.
    """
    if people is not None:
        every, root, named = _read_people(people)
    else:
        every, root, named = _read(file, images, lfw, lfw_list or LFW_LIST)
    pairs = people_disjoint(every, classes).pairs if unseen else every
    counts = count_pairs(pairs)
    if 0 in (counts["same"], counts["different"]):
        kind = "same" if counts["same"] == 0 else "different"
        raise ValueError(f"{named['list']} has {len(pairs):,} pairs, but none is {kind!r}: both kinds are needed")
    known = 0 if unseen else _count_known(pairs, classes)
    note = f"{known:,} of {len(pairs):,} pairs show a class that the run was trained on, which is easier: see --unseen"
    about = {
        **named,
        "name": named["name"].removesuffix(".txt") + ("-unseen" if unseen else ""),
        "images": str(root.resolve()),
        "files": len(pairs.names),
        **counts,
        "left_out": len(every) - len(pairs),
        "notes": [note] if known else [],
    }
    if people is not None:
        about["people"] = len({folder_of(name) for name in pairs.names})
        about["notes"] += _folder_notes(people, every)
    return PairList(pairs, root, about)


def _read_people(folder: Path) -> tuple[Pairs, Path, dict[str, str]]:
    """The pairs of a folder of people, and the names, as in `_read`."""
    pairs, path = folder_pairs(folder), folder.resolve()
    return pairs, folder, {"name": f"people-{path.name}", "list": str(folder), "list_file": str(path)}


def _folder_notes(folder: Path, pairs: Pairs) -> list[str]:
    """Notes on images of a folder that are not used, and on pairs if they are a part of all."""
    stray, every, notes = len(image_names(folder)), math.comb(len(pairs.names), 2), []
    if stray:
        notes.append(f"images directly in {folder}, not in the folder of a person, are not used: {stray:,} of them")
    if len(pairs) < every:
        notes.append(f"these are a random part of all {every:,} pairs")
    return notes


def _read(
    file: Path | None, images: Path | None, lfw: Path | None, lfw_list: str
) -> tuple[Pairs, Path, dict[str, str]]:
    """The pairs of a list, the folder of their images, and the names of report, list and list file."""
    if file is not None:
        root, name, shown = images or file.parent, f"pairs-{file.stem}", str(file)
        return read_pairs(file, root), root, {"name": name, "list": shown, "list_file": str(file.resolve())}
    assert lfw is not None
    data = LfwData.found_in(lfw, lfw_list)
    path = str(data.list_file(lfw_list).resolve())
    named = {"name": f"lfw-{lfw_list}", "list": f"LFW {lfw_list}", "list_file": path}
    return data.pairs(lfw_list), data.root, named


def _count_known(pairs: Pairs, classes: Sequence[str]) -> int:
    """The number of pairs with an image in a folder that has the name of a class."""
    known = torch.tensor([folder_of(name) in classes for name in pairs.names], device="cpu")
    return int((known[pairs.first] | known[pairs.second]).sum())
