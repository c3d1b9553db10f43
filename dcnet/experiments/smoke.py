"""Every experiment in small: the same networks and operators, made narrow, for a few steps on the digits."""

import dataclasses

from dcnet.data import Augmentation
from dcnet.experiments.experiment import Cell, Experiment
from dcnet.training import RunConfig

WIDTH, STEPS, IMAGES = 0.05, 2, 60
# What the digits have none of, faces, classes that are held back and a folder of images, and what takes too long here.
ELSEWHERE = ("faces", "open-set", "attacks-today", "attack-choice", "top-5")
NOTE = "In small, on the digits: that it runs is what counts, and the numbers mean nothing."


def in_small(experiment: Experiment) -> Experiment:
    """The experiment with runs of a second each; its numbers mean nothing."""
    cells = tuple(_cell(cell) for cell in experiment.cells)
    title = f"{experiment.title} (smoke test)"
    # Two steps decide no contest.
    small = dataclasses.replace(experiment, cells=cells, seeds=1, contest=False)
    return dataclasses.replace(small, not_run=None, title=title, notes=(NOTE,))


def _cell(cell: Cell) -> Cell:
    if cell.config is None:
        return cell
    # Beside the paper's numbers those of the digits would only confuse.
    small = dataclasses.replace(cell, config=_config(cell.config), paper=None)
    if cell.evaluation not in ELSEWHERE:
        return small
    # Its network is trained, and nothing stands in for what is not measured of it.
    return dataclasses.replace(small, evaluation=None, metric=())


def _config(config: RunConfig) -> RunConfig:
    return dataclasses.replace(
        config,
        dataset="digits",
        width=WIDTH,
        steps=STEPS,
        epochs=None,
        batch_size=IMAGES // 2,
        train_images=IMAGES,
        image_size=None,
        evaluate_every=STEPS,
        precision="float32",
        pixel_mean=(0.0,),
        pixel_std=(1.0,),
        augmentation=Augmentation(),
    )
