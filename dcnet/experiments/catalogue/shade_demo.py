"""Handwritten digits under uneven light: the experiment of `make demo`, on embedded data, in a few minutes.

The networks are trained in even light. A shade multiplies each patch by nearly one number, which a layer that depends
on the direction of a patch only does not see. Pixels of these digits start at 0 and no mean is subtracted from them, so
this holds from the first layer on.
"""

from typing import Any

from dcnet.data import Augmentation
from dcnet.experiments.catalogue.corruption_contest import CORRUPTIONS, LIT_CROPS
from dcnet.experiments.experiment import Cell, Experiment, register
from dcnet.operator import PLAIN
from dcnet.robustness.corruptions import registry
from dcnet.training import recipe

LIGHT = Augmentation(brightness=LIT_CROPS.brightness, contrast=LIT_CROPS.contrast)
NETWORKS: dict[str, dict[str, Any]] = {
    "plain": {"operator": PLAIN},
    "plain, standardized": {"operator": PLAIN, "standardize": "image"},
    "plain, augmented": {"operator": PLAIN, "augmentation": LIGHT},
    "sphere-cos": {"operator": "sphere-cos"},
    "sphere-cos, augmented": {"operator": "sphere-cos", "augmentation": LIGHT},
}
# By column: a kind of corruption and its severity. A shade is named by the light that is left in the darkest corner.
SHADES = {f"{registry['shade'].levels[severity - 1]:.0%} light": ("shade", severity) for severity in (3, 4, 5)}
COLUMNS = {**SHADES, "noise": ("noise", 5)}
EVEN = "even light"
NOTES = (
    "Test images in even light, in uneven light with this share of it in the darkest corner, and with noise. "
    "All networks are trained in even light. Standardized: mean 0 and deviation 1 of each image. Augmented: random "
    "brightness and contrast of training images.",
)


@register
def digits_in_shade() -> Experiment:
    """Plain networks and one with `sphere-cos` on test images under uneven light."""
    configs = {row: recipe("digits", width=0.5, **own) for row, own in NETWORKS.items()}
    cells: list[Cell] = []
    for row, config in configs.items():
        cells.append(Cell(row, EVEN, config))
        for column, (kind, severity) in COLUMNS.items():
            metric = ("evaluations", CORRUPTIONS, "by_kind", kind, severity - 1)
            cells.append(Cell(row, column, config, metric=metric, factor=100.0, evaluation=CORRUPTIONS))
    title = "Handwritten digits under uneven light, test error in %"
    return Experiment("digits_in_shade", title, tuple(cells), seeds=3, notes=NOTES)
