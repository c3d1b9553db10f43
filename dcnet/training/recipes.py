"""Recipes: functions that return a config, whose values can be replaced."""

import dataclasses
import shlex
from collections.abc import Callable
from typing import Any

from dcnet.data import Augmentation
from dcnet.models.timm_models import timm_pixels
from dcnet.operator import PLAIN
from dcnet.registry import unknown_name
from dcnet.training.config import OWN_WEIGHTS, WITH_MOMENTUM, RunConfig
from dcnet.training.schedules import Cosine, Linear, Steps

# Normalization as (rgb - 127.5) / 128, for pixels in [0, 1].
CENTER, RANGE = (127.5 / 255,), (128 / 255,)
# Mean and deviation of the pixels of CIFAR-100, by color.
CIFAR_MEAN, CIFAR_STD = (0.507, 0.487, 0.441), (0.267, 0.256, 0.276)


def faces() -> RunConfig:
    """SphereFace-20 with A-softmax on people of LFW, for verification of other people; one to two minutes on an H200.

    The SphereFace paper uses no batch normalization, but trains on half a million images. With so few images,
    training is much faster with it.
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
    """CNN-9 with A-softmax on 80 classes of CIFAR-100, for verification of the other 20."""
    return _with_margin(
        recipe="open-set",
        dataset="cifar100-open",
        model="cnn9",
        steps=10_000,
        schedule=Steps((5_000, 7_500)),
        evaluate_every=1_000,
    )


def _with_margin(**own: Any) -> RunConfig:
    """Returns a config with the common values of `faces` and `open_set`.

    The features come from a plain linear layer. Those of bounded operators have too small norms for logits
    ||x|| cos(theta) with many classes, and those after an activation are all in one orthant.
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
        pixel_mean=CENTER,
        pixel_std=RANGE,
        **own,
    )


def digits() -> RunConfig:
    """Handwritten digits of scikit-learn; takes seconds on any machine."""
    return RunConfig(
        recipe="digits",
        dataset="digits",
        model="cnn9-small",
        epochs=30,
        batch_size=30,
        lr=3e-3,
        schedule=Cosine(),
        pixel_mean=(0.0,),
        pixel_std=(1.0,),
    )


def paper_cifar() -> RunConfig:
    """CIFAR as in Tables 1 to 5: Adam for 42,500 steps of 128 images, weight projection and orthonormal filters."""
    return RunConfig(
        recipe="paper-cifar",
        dataset="cifar100",
        model="resnet32",
        steps=42_500,
        batch_size=128,
        optimizer="adam",
        lr=1e-3,
        weight_decay=5e-4,
        schedule=Steps((20_000, 30_000, 37_500)),
        label_smoothing=0.01,
        log_floor=1e-4,
        augmentation=Augmentation(pad=4, pad_mode="symmetric", flip=True),
        norm_momentum=1e-3,
        projection_every=100,
        orthonormal=1e-5,
        precision="bfloat16",
        pixel_mean=CENTER,
        pixel_std=RANGE,
    )


def paper_imagenet() -> RunConfig:
    """ImageNet as in Table 6: SGD for 700,000 steps of 40 images, from a folder of images."""
    return RunConfig(
        recipe="paper-imagenet",
        dataset="imagefolder",
        model="resnet18-modified",
        image_size=224,
        steps=700_000,
        batch_size=40,
        optimizer="sgd",
        lr=0.1,
        momentum=0.9,
        weight_decay=1e-4,
        schedule=Steps((200_000, 375_000, 550_000)),
        augmentation=Augmentation(flip=True),
        pixel_mean=(121.6 / 255, 116.6 / 255, 102.7 / 255),
        pixel_std=(1 / 255,),
        projection_every=100,
        orthonormal=1e-5,
        precision="bfloat16",
    )


def paper_attack() -> RunConfig:
    """CIFAR-10 as in Tables 7 and 8 (attacks): `paper_cifar` without weight projection and orthonormal filters."""
    return dataclasses.replace(
        paper_cifar(), recipe="paper-attack", dataset="cifar10", model="cnn9-small", projection_every=0, orthonormal=0.0
    )


def vit_cifar() -> RunConfig:
    """A small vision transformer on CIFAR-100: AdamW for 200 epochs with a warmup, crops, flips and cutout."""
    return RunConfig(
        recipe="vit-cifar",
        dataset="cifar100",
        model="vit-tiny",
        epochs=200,
        batch_size=128,
        optimizer="adamw",
        lr=1e-3,
        weight_decay=0.05,
        schedule=Cosine(warmup=0.025),
        label_smoothing=0.1,
        augmentation=Augmentation(pad=4, pad_mode="symmetric", flip=True, cutout=8),
        precision="bfloat16",
        pixel_mean=CENTER,
        pixel_std=RANGE,
    )


def features() -> RunConfig:
    """MNIST with two features for `dcnet plot features`, as in Figures 1 and 6; takes minutes on one core."""
    return RunConfig(
        recipe="features",
        dataset="mnist",
        model="cnn9-small",
        width=0.25,
        margin="softmax",
        features=2,
        feature_snapshots=1000,
        steps=1200,
        batch_size=128,
        lr=3e-3,
        evaluate_every=75,
    )


def finetune() -> RunConfig:
    """A pretrained timm network on a folder of images: AdamW for 10 epochs from the weights of timm."""
    return RunConfig(
        recipe="finetune",
        dataset="imagefolder",
        model="timm:resnet18",
        weights=OWN_WEIGHTS,
        image_size=224,
        epochs=10,
        batch_size=32,
        optimizer="adamw",
        lr=3e-4,
        weight_decay=0.05,
        schedule=Cosine(),
        label_smoothing=0.1,
        augmentation=Augmentation(flip=True),
        pixel_mean=(0.485, 0.456, 0.406),
        pixel_std=(0.229, 0.224, 0.225),
    )


def speedrun() -> RunConfig:
    """Fast training of ResNet-32 on CIFAR-100: Muon, batches of 512, and images that grow."""
    return RunConfig(
        recipe="speedrun",
        dataset="cifar100",
        model="resnet32",
        steps=3_600,
        batch_size=512,
        optimizer="muon",
        lr=0.01,
        other_rate=0.2,
        weight_decay=0.05,
        schedule=Linear(),
        label_smoothing=0.1,
        augmentation=Augmentation(pad=4, pad_mode="reflect", flip=True, alternate_flips=True),
        progressive_sizes="16:0.35,24:0.7",
        projection_every=1,
        evaluate_every=3_600,
        precision="bfloat16",
        pixel_mean=CIFAR_MEAN,
        pixel_std=CIFAR_STD,
    )


def speedrun_small() -> RunConfig:
    """Fast training of a small network, `speednet`, on CIFAR-100: Muon, batches of 1,024, and images that grow."""
    return dataclasses.replace(
        speedrun(),
        recipe="speedrun-small",
        model="speednet",
        steps=880,
        batch_size=1_024,
        lr=0.03,
        other_rate=0.07,
        norm_momentum=0.3,
        progressive_sizes="20:0.5",
        evaluate_every=880,
    )


# Options of `dcnet train` by config field; most have the name of the field.
_OWN_NAMES = {"operator": "--operators", "seed": "--seeds"}
_NOT_OPTIONS = ("recipe", "augmentation", "schedule", "pixel_mean", "pixel_std", "data", "network")
OPTIONS = {
    declared.name: _OWN_NAMES.get(declared.name, "--" + declared.name.replace("_", "-"))
    for declared in dataclasses.fields(RunConfig)
    if declared.name not in _NOT_OPTIONS
}

RECIPES: dict[str, Callable[[], RunConfig]] = {
    "digits": digits,
    "features": features,
    "finetune": finetune,
    "paper-cifar": paper_cifar,
    "paper-imagenet": paper_imagenet,
    "paper-attack": paper_attack,
    "faces": faces,
    "open-set": open_set,
    "vit-cifar": vit_cifar,
    "speedrun": speedrun,
    "speedrun-small": speedrun_small,
}


def recipe(name: str, **changes: Any) -> RunConfig:
    """Returns the config of a recipe with some values replaced; `steps` replaces `epochs` and vice versa.

    If the length of the run changes, the milestones of the learning rate scale with it. The recipe's label smoothing
    is dropped for margins that do not support it. Raises ValueError for given values that would have no effect, such
    as label smoothing with such a margin, or a momentum for Adam. With pretrained weights of timm, pixels are
    normalized as timm expects.
    """
    if name not in RECIPES:
        raise unknown_name("recipe", name, RECIPES)
    base = RECIPES[name]()
    for given, other in (("steps", "epochs"), ("epochs", "steps")):
        if changes.get(given) is not None:
            changes.setdefault(other, None)
    longer = changes.get("steps") or changes.get("epochs")
    if longer and "schedule" not in changes and base.steps and isinstance(base.schedule, Steps):
        changes["schedule"] = _scale_milestones(base.schedule, base.steps, changes.get("steps"))
    config = dataclasses.replace(base, **changes)
    if changes.get("weights") is not None and changes.get("pretrained") is not None:
        both = f"weights={config.weights!r} and pretrained={config.pretrained!r}"
        raise ValueError(f"{both} exclude each other: give one")
    if config.weights is not None and {"model", "weights"} & changes.keys():
        config = _with_pixels(config, changes)
    _check_effect(config, changes)
    return config


def _with_pixels(config: RunConfig, changes: dict[str, Any]) -> RunConfig:
    """Returns the config with the pixel mean and deviation of the timm network, unless they are given."""
    mean, std = timm_pixels(config.model.partition(":")[2])
    own: dict[str, Any] = {"pixel_mean": mean, "pixel_std": std}
    return dataclasses.replace(config, **{name: value for name, value in own.items() if name not in changes})


def _check_effect(config: RunConfig, asked: dict[str, Any]) -> None:
    """Raises ValueError for given values that would have no effect."""
    if (smoothing := asked.get("label_smoothing")) and not config.label_smoothing:
        names = ("interclass_filtering_threshold", "sample_classes")
        given = [f"{name}={value!r}" for name in names if (value := getattr(config, name)) is not None]
        what = given[0] if given else f"margin {config.margin!r}"
        raise ValueError(f"{what} does not support label_smoothing (got {smoothing!r}): omit one of them")
    if (floor := asked.get("log_floor")) and not config.log_floor:
        raise ValueError(f"margin {config.margin!r} has no log_floor (got {floor!r}): omit one of them")
    if asked.get("momentum") is not None and config.optimizer not in WITH_MOMENTUM:
        raise ValueError(f"optimizer {config.optimizer!r} has no momentum (got {config.momentum}): omit it, or use sgd")
    if asked.get("other_rate") is not None and config.other_rate is None:
        raise ValueError(
            f"optimizer {config.optimizer!r} has no other_rate (got {asked['other_rate']}): omit it, or use muon"
        )
    if asked.get("norm_momentum") is not None and config.norm not in (None, "batch"):
        raise ValueError(f"norm {config.norm!r} has no norm_momentum (got {config.norm_momentum}): omit one of them")


def _scale_milestones(schedule: Steps, before: int, after: int | None) -> Steps:
    """Moves milestones to the same fractions of `after` steps; they are fractions if `after` is None."""
    shares = [milestone / before for milestone in schedule.milestones]
    moved = (max(1, round(share * after)) if after else share for share in shares)
    return dataclasses.replace(schedule, milestones=tuple(moved))


def command_of(config: RunConfig) -> str:
    """Returns the `dcnet train` command of a config, with options for values that differ from the recipe."""
    base, words = recipe(config.recipe), [f"dcnet train --recipe {config.recipe}"]
    if not config.decoupled:
        words.append(f"--operators {PLAIN}")
        base = dataclasses.replace(base, operator=PLAIN)
    for declared in dataclasses.fields(RunConfig):
        value = getattr(config, declared.name)
        if declared.name in OPTIONS and value is not None and value != getattr(base, declared.name):
            words.append(f"{OPTIONS[declared.name]} {shlex.quote(str(value))}")
    if config.schedule != recipe(config.recipe, steps=config.steps, epochs=config.epochs).schedule:
        words.append(f"--schedule {config.schedule.name}")
    for name in ("pad", "flip", "cutout", "brightness", "contrast", "alternate_flips"):
        if getattr(config.augmentation, name) != getattr(base.augmentation, name):
            words.append(f"--{name.replace('_', '-')} {getattr(config.augmentation, name)}")
    return " ".join(words)
