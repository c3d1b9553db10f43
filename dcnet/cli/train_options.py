"""Options of `dcnet train`: all of them replace a value of the recipe, where they are given."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from dcnet.environment import default_workers

RECIPE_OWN = "(default: by recipe)"


def by_recipe(metavar: str) -> Any:
    """How an option is shown that the recipe decides."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=RECIPE_OWN)


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """What is trained, and on what."""

    dataset: Annotated[str | None, by_recipe("NAME")] = None
    """One of `dcnet list datasets`."""

    train_images: Annotated[int | None, by_recipe("N")] = None
    """Use so many of the training images, each class in proportion."""

    model: Annotated[str | None, by_recipe("NAME")] = None
    """One of `dcnet list models`, or timm:<name>."""

    width: Annotated[float | None, by_recipe("FACTOR")] = None
    """Multiplies the channels of all layers."""

    norm: Annotated[Literal["batch", "none"] | None, by_recipe("{batch,none}")] = None
    """Normalisation after each layer."""

    activation: Annotated[Literal["relu", "prelu", "none"] | None, by_recipe("{relu,prelu,none}")] = None
    """Activation after each layer."""

    classifier: Annotated[Literal["linear", "normalized"] | None, by_recipe("{linear,normalized}")] = None
    """The last layer; normalized is that of the weight-normalised softmax."""

    margin: Annotated[str | None, by_recipe("SPEC")] = None
    """End with a head that has this margin, such as a-softmax or "arcface(m=0.3)"; see `dcnet list margins`."""

    margin_scale: Annotated[str | None, by_recipe("NUMBER")] = None
    """Scale of that head: a number, norm or learned."""

    annealing: Annotated[Literal["auto", "none"] | None, by_recipe("{auto,none}")] = None
    """How that margin is let in: auto watches the angle, none is at once."""

    features: Annotated[int | None, by_recipe("N")] = None
    """Leave so many features for that head: 2 can be drawn."""

    feature_snapshots: Annotated[int | None, by_recipe("N")] = None
    """Keep 2 or 3 features of so many test images at each evaluation, for `dcnet plot features --animate`."""

    norm_momentum: Annotated[float | None, by_recipe("NUMBER")] = None
    """Weight of the newest batch in the statistics of batch normalisation."""

    image_size: Annotated[int | None, by_recipe("N")] = None
    """Side of the crops from a folder of images, which a vision transformer of timm is made for."""

    pretrained: Annotated[str | None, by_recipe("RUN")] = None
    """Start from the weights of this run, or of this file in the folder of one, such as a checkpoint."""

    weights: Annotated[str | None, by_recipe("FILE")] = None
    """Start a network of timm from this file in timm's naming, .safetensors or .pth; timm for those that timm has."""


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """How it is trained."""

    steps: Annotated[int | None, by_recipe("N")] = None
    """Steps of the optimizer."""

    epochs: Annotated[int | None, by_recipe("N")] = None
    """Passes over the training images, in place of steps."""

    batch_size: Annotated[int | None, by_recipe("N")] = None
    """Images of a step, over all processes."""

    optimizer: Annotated[Literal["adam", "adamw", "sgd"] | None, by_recipe("{adam,adamw,sgd}")] = None
    """The optimizer."""

    lr: Annotated[float | None, by_recipe("NUMBER")] = None
    """Learning rate at the start."""

    momentum: Annotated[float | None, by_recipe("NUMBER")] = None
    """Momentum of sgd."""

    weight_decay: Annotated[float | None, by_recipe("NUMBER")] = None
    """L2 decay of all but unweighted decoupled filters and what operators learn."""

    schedule: Annotated[
        Literal["step", "plateau", "cosine", "constant"] | None, by_recipe("{step,plateau,cosine,constant}")
    ] = None
    """How the learning rate falls: step drops to a tenth after one half and three quarters of the steps."""

    label_smoothing: Annotated[float | None, by_recipe("NUMBER")] = None
    """Share of the label that is spread over all classes; sphereface2 takes none, and not that of the recipe."""

    pad: Annotated[int | None, by_recipe("N")] = None
    """Crop at random after padding every side by so many pixels."""

    flip: Annotated[bool | None, by_recipe("{True,False}")] = None
    """Flip images left to right at random."""

    cutout: Annotated[int | None, by_recipe("N")] = None
    """Side of a grey square at a random place of each image."""

    adversary: Annotated[str | None, by_recipe("SPEC")] = None
    """Train on images changed against the network: fgsm, "pgd(epsilon=8/255,steps=7)" or "trades(beta=6)"."""

    projection_every: Annotated[int | None, by_recipe("N")] = None
    """Steps from one weight projection to the next, 0 for none."""

    weighted_gradients: Annotated[Literal["none", "gradient", "update"] | None, by_recipe("{none,gradient,update}")] = (
        None
    )
    """Multiply gradients, or updates, of filters by their norms."""

    orthonormal: Annotated[float | None, by_recipe("NUMBER")] = None
    """Coefficient of the orthonormal constraint in the loss."""

    precision: Annotated[Literal["float32", "bfloat16"] | None, by_recipe("{float32,bfloat16}")] = None
    """What to compute in; bfloat16 keeps the weights in float32."""

    evaluate_every: Annotated[int | None, by_recipe("N")] = None
    """Steps from one look at the test set to the next, in place of once an epoch."""


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """Where it is trained; nothing of this changes what comes out, but for rounding."""

    runs: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="(default: runs)")] = None
    """Where the folders of runs are."""

    data_dir: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="(default: DCNET_DATA)")] = None
    """Where the datasets are; what is missing is downloaded to a cache. --resume knows the folder of its images."""

    skip_bad_images: bool = False
    """Leave out images of a folder that cannot be read; they are named, and noted in the record."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto is cuda where there is a GPU."""

    compile: bool = False
    """Compile the network and the constraint by torch.compile: a minute or two that pay in long runs on a GPU."""

    no_graph: bool = False
    """Do not replay steps as a CUDA graph."""

    workers: Annotated[int, tyro.conf.arg(metavar="N")] = field(default_factory=default_workers)
    """Processes that read a folder of images; by default one a core, up to 8."""

    checkpoint_every: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="(default: by time)")] = None
    """Steps from one checkpoint to the next, in place of one a minute."""

    tracker: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(optional)")] = None
    """One of accelerate's trackers, such as tensorboard or wandb."""


def given(options: Any) -> dict[str, Any]:
    """The options that were given, by name."""
    values = {declared.name: getattr(options, declared.name) for declared in fields(options)}
    return {name: value for name, value in values.items() if value is not None}
