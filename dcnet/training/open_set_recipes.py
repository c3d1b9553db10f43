"""How networks are trained that are tested with people and classes they have never seen."""

from typing import Any

from dcnet.data import Augmentation
from dcnet.training.config import RunConfig
from dcnet.training.schedules import Steps

# (rgb - 127.5) / 128, of pixels from 0 to 1.
CENTRE, REACH = (127.5 / 255,), (128 / 255,)


def faces() -> RunConfig:
    """People of LFW by SphereFace-20 and A-softmax, to be tested with other people; a few minutes on a GPU.

    SphereFace has no normalisation, but half a million images; here the features leave the one line that they begin on
    much sooner with it.
    """
    return _with_margin(
        recipe="faces",
        dataset="lfw",
        model="sphereface20",
        norm="batch",
        steps=3_000,
        schedule=Steps((1_800, 2_550)),
        evaluate_every=500,
    )


def open_set() -> RunConfig:
    """80 classes of CIFAR-100 by CNN-9 and A-softmax, to be tested with the other 20."""
    return _with_margin(
        recipe="open-set",
        dataset="cifar100-open",
        model="cnn9",
        steps=10_000,
        schedule=Steps((5_000, 7_500)),
        evaluate_every=1_000,
    )


def _with_margin(**own: Any) -> RunConfig:
    """What both have in common.

    The features end in a plain layer: those of bounded operators are too short for logits of ||x|| cos(theta) to tell
    many classes apart, and those after an activation lie in one corner of the sphere.
    """
    return RunConfig(
        margin="a-softmax",
        features=512,
        batch_size=128,
        optimizer="adam",
        lr=1e-3,
        weight_decay=5e-4,
        augmentation=Augmentation(pad=4, pad_mode="symmetric", flip=True),
        precision="bfloat16",
        pixel_mean=CENTRE,
        pixel_std=REACH,
        **own,
    )
