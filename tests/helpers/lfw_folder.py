"""A small folder in the layout of LFW, with small lists."""

from pathlib import Path

import numpy as np
from PIL import Image

PEOPLE = {"Ada_One": 3, "Bob_Two": 2, "Cy_Three": 1, "Di_Four": 2}
PAIRS = """2\t1
Ada_One\t1\t2
Bob_Two\t1\tCy_Three\t1
Di_Four\t1\t2
Ada_One\t3\tDi_Four\t2
"""
DEV_TEST = "1\nBob_Two\t1\t2\nCy_Three\t1\tDi_Four\t1\n"
DEV_TRAIN = "2\nAda_One\t3\nCy_Three\t1\n"


def write_image(file: Path, seed: int, width: int = 12, height: int = 12) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file)


def write_lfw(folder: Path, suffix: str = ".jpg") -> Path:
    """The people above, and the lists pairs, pairsDevTest, pairsDevTrain and peopleDevTrain."""
    for place, (person, count) in enumerate(PEOPLE.items()):
        for number in range(1, count + 1):
            write_image(folder / person / f"{person}_{number:04d}{suffix}", 10 * place + number)
    lists = {"pairs": PAIRS, "pairsDevTest": DEV_TEST, "pairsDevTrain": DEV_TEST, "peopleDevTrain": DEV_TRAIN}
    for name, text in lists.items():
        (folder / f"{name}.txt").write_text(text)
    return folder
