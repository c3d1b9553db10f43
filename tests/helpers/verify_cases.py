"""Images, lists of pairs and runs for the tests of `dcnet verify`."""

import dataclasses
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from dcnet.data import load_dataset
from dcnet.training import Run, RunConfig, load_model
from dcnet.verification import Calibration, pair_scores, read_pairs, sample_pairs
from helpers.cli_runs import trained, untrained_run
from helpers.lfw_folder import write_image

IMAGES, PAIRS = 60, 240


def copied(folder: Path, operator: str = "conv") -> Run:
    """A writable copy of a trained run of digits."""
    return Run(shutil.copytree(trained()[operator].folder, folder))


def digit_pairs(folder: Path) -> Path:
    """Test images of digits, and a list of pairs of them."""
    test = load_dataset("digits").test
    folder.mkdir(parents=True)
    for place in range(IMAGES):
        Image.fromarray(test.images[place, 0].numpy()).save(folder / f"{place}.png")
    pairs = sample_pairs(test.labels[:IMAGES], PAIRS, seed=0)
    rows = zip(pairs.first.tolist(), pairs.second.tolist(), pairs.same.tolist(), strict=True)
    return listed(folder / "pairs.csv", ((f"{first}.png", f"{second}.png", same) for first, second, same in rows))


def listed(file: Path, rows: Iterable[tuple[str, str, bool]]) -> Path:
    file.write_text("".join(f"{first},{second},{int(same)}\n" for first, second, same in rows))
    return file


def digit_scores(run: Run, file: Path, flip: bool = True) -> tuple[Tensor, Tensor]:
    """The cosines of the pairs in a list, and their answers, computed without the command."""
    pairs = read_pairs(file)
    pixels = np.stack([np.array(Image.open(file.parent / name)) for name in pairs.names])
    found = embeddings(load_model(run)[0], torch.from_numpy(pixels)[:, None], flip)
    return pair_scores(found, pairs.first, pairs.second), pairs.same


def embeddings(model: nn.Module, images: Tensor, flip: bool = True) -> Tensor:
    pixels = images.float() / 255 if images.dtype == torch.uint8 else images
    with torch.no_grad():
        found = model.features(pixels)
        return found + model.features(pixels.flip(-1)) if flip else found


def margin_run(folder: Path) -> Run:
    """An untrained network for digits, with eight features and a margin head."""
    config = RunConfig(operator="conv", width=0.1, epochs=1, margin="am-softmax", features=8)
    return untrained_run(folder, config, [str(i) for i in range(10)], channels=1, size=8)


def set_thresholds(run: Run, lower: float, upper: float) -> None:
    """Replaces the thresholds in the calibration of a run."""
    file = run.folder / "verification.json"
    found = Calibration.load(file)
    decision = dataclasses.replace(found.decision, lower=lower, upper=upper)
    dataclasses.replace(found, decision=decision).save(file)


def lfw_folder(folder: Path, people: Iterable[str]) -> Path:
    """Two images of each person in LFW's layout, and two folds of pairs, each of one same and one different pair."""
    first, second, third, fourth = people
    for place, person in enumerate((first, second, third, fourth)):
        for number in (1, 2):
            write_image(folder / person / f"{person}_{number:04d}.jpg", 2 * place + number)
    folds = [f"{a}\t1\t2\n{a}\t1\t{b}\t1\n" for a, b in ((first, second), (third, fourth))]
    (folder / "pairs.txt").write_text("2\t1\n" + "".join(folds))
    (folder / "pairsDevTest.txt").write_text(
        f"2\n{first}\t1\t2\n{second}\t1\t2\n{first}\t1\t{third}\t1\n{second}\t2\t{fourth}\t1\n"
    )
    return folder
