"""The config of a run: every value that changes its results."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from dcnet.checks import check_choice, check_number, check_whole
from dcnet.convert.calibrate import calibratable
from dcnet.data import Augmentation
from dcnet.losses import as_margin
from dcnet.models.timm_models import PREFIX
from dcnet.operator import PLAIN, Operator, is_plain
from dcnet.parameters import convert_numbers
from dcnet.training.adversarial import Adversary, as_adversary
from dcnet.training.schedules import Cosine, ImageSizes, Schedule, schedule_of

# Valid names of fields, and minimum values of integer fields.
CHOICES = {
    "optimizer": ("adam", "adamw", "sgd", "muon", "sphere-sgd"),
    "precision": ("float32", "bfloat16"),
    "standardize": ("none", "image", "channel", "scale"),
    "weighted_gradients": ("none", "gradient", "update"),
}
# Optimizers with the field `momentum`, and those that need filters whose norm has no effect.
WITH_MOMENTUM, ON_SPHERE = ("sgd", "muon", "sphere-sgd"), ("sphere-sgd",)
# Optimizers of filters, which update other parameters by AdamW.
OF_FILTERS = ("muon", "sphere-sgd")
ANNEALINGS = ("auto", "none")
LEAST = {
    "steps": 1,
    "epochs": 1,
    "batch_size": 2,
    "projection_every": 0,
    "seed": 0,
    "train_images": 1,
    "evaluate_every": 1,
    "image_size": 1,
    "features": 1,
    "feature_snapshots": 0,
}
# The value of `weights` for those that timm provides, instead of a file.
OWN_WEIGHTS = "timm"
# Seeds of torch have this many bits.
SEED_BITS = 63
# Folder names have at most 255 bytes; a hash, and possibly a prefix, are added to this.
LONGEST_NAME = 200


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The config of one run: network, data and training.

    Attributes:
        recipe: the recipe that the other values come from.
        train_images: size of a stratified subset of the training images, drawn with the seed; None for all images.
        norm: see `dcnet.create_model`; None for the default of the network.
        activation: see `dcnet.create_model`; None for the default of the network.
        classifier: see `dcnet.create_model`; None for the default of the network.
        norm_momentum: see `dcnet.create_model`; None for the default of the network.
        init_variance: see `dcnet.create_model`; None for the default of the network.
        image_size: side of the crops from a folder of images; other datasets have a fixed size.
        progressive_sizes: smaller training images first: "16:0.4,24:0.7" for 16 pixels in the first 40 % of the steps,
            24 up to 70 %, and then the full size. The network must take images of any size.
        margin: a spec such as "a-softmax(m=2)" for a head with a margin instead of the classifier.
        margin_scale: a number, "norm" or "learned"; None for the default of the margin.
        annealing: "auto" or "none"; None for the default of the margin.
        interclass_filtering_threshold: other classes with a cosine above it are left out of the loss of the head.
        sample_classes: fraction of the classes that the head uses in a step: those of the batch, and others at random;
            with several processes, of the classes of each. None for all classes.
        features: size of a linear layer between network and head; None for no such layer.
        feature_snapshots: number of test images whose features are stored at each evaluation; needs 2 or 3 features.
        adversary: a spec such as "fgsm" or "pgd(epsilon=8/255,steps=7)" for adversarial training.
        steps: optimizer steps; give either `steps` or `epochs`.
        optimizer: "adam", "adamw", "sgd", or one of `dcnet.filter_optimizers`: "muon" or "sphere-sgd".
        lr: initial learning rate; the angle of a step, in radians, for sphere-sgd.
        other_rate: multiplies the learning rate of parameters that are no filters, for muon and sphere-sgd; None for
            the default of the optimizer.
        weight_decay: added to the gradient by adam and sgd, decoupled by the others; `dcnet.optim.param_groups` selects
            the parameters.
        decay_weighted: whether the filters of weighted operators decay. Ignored for all others.
        label_smoothing: share of the label that is spread over all classes; always 0 for margins with one binary
            loss per class.
        log_floor: added to the probability inside the logarithm of the loss; always 0 with a margin.
        pixel_mean: the network normalizes pixels x in [0, 1] to (x - mean) / std.
        pixel_std: see `pixel_mean`.
        standardize: "image" or "channel" to standardize each image, or each of its channels, to mean 0 and deviation 1,
            or "scale" to scale each image to a mean square of 1, in place of `pixel_mean` and `pixel_std`; or "none".
        projection_every: steps between weight projections; 0 for none, 1 for a part of every step. Ignored for plain
            networks.
        weighted_gradients: "gradient" or "update" as in `dcnet.optim.WeightedGradients`, or "none". Ignored for plain
            networks.
        orthonormal: coefficient of `dcnet.regularizers.orthonormal` / 2 in the loss. Ignored for plain networks.
        pretrained: a run or a checkpoint whose weights training starts from.
        weights: a file of pretrained weights of a timm network, or "timm" for those that timm provides. A decoupled
            network is calibrated first, and its layers learn a scale per channel. If `pretrained` is given as well,
            the weights come from that run, and `weights` only makes the layers learn their scales.
        evaluate_every: steps between evaluations; None for every epoch.
        data: the fingerprint of a folder of images or of a custom dataset; see `dcnet.training.identity`.
        network: the fingerprint of the structure of a custom network; `model` is its name.
    """

    recipe: str = "digits"
    dataset: str = "digits"
    train_images: int | None = None
    model: str = "cnn9-small"
    operator: str = "tanh-cos"
    width: float = 1.0
    norm: str | None = None
    activation: str | None = None
    classifier: str | None = None
    norm_momentum: float | None = None
    init_variance: float | None = None
    image_size: int | None = None
    progressive_sizes: str | None = None
    margin: str | None = None
    margin_scale: float | str | None = None
    annealing: str | None = None
    interclass_filtering_threshold: float | None = None
    sample_classes: float | None = None
    features: int | None = None
    feature_snapshots: int = 0
    adversary: str | None = None
    steps: int | None = None
    epochs: int | None = None
    batch_size: int = 128
    optimizer: str = "adam"
    lr: float = 1e-3
    momentum: float = 0.9
    other_rate: float | None = None
    weight_decay: float = 0.0
    decay_weighted: bool = True
    schedule: Schedule = field(default_factory=Cosine)
    label_smoothing: float = 0.0
    log_floor: float = 0.0
    augmentation: Augmentation = field(default_factory=Augmentation)
    pixel_mean: tuple[float, ...] = (0.0,)
    pixel_std: tuple[float, ...] = (1.0,)
    standardize: str = "none"
    projection_every: int = 0
    weighted_gradients: str = "none"
    orthonormal: float = 0.0
    pretrained: str | None = None
    weights: str | None = None
    precision: str = "float32"
    evaluate_every: int | None = None
    data: str | None = None
    network: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        # JSON has no numbers of NumPy.
        convert_numbers(self)
        spec = PLAIN if is_plain(self.operator) else str(Operator.parse(self.operator))
        object.__setattr__(self, "operator", spec)
        if is_plain(spec):
            # Reset rather than rejected, so that a recipe can be used for plain networks as well.
            for name, nothing in {"projection_every": 0, "weighted_gradients": "none", "orthonormal": 0.0}.items():
                object.__setattr__(self, name, nothing)
        if is_plain(spec) or not Operator.parse(spec).weighted:
            object.__setattr__(self, "decay_weighted", True)
        if self.optimizer not in OF_FILTERS:
            # Reset as well, so that a recipe can be used with other optimizers.
            object.__setattr__(self, "other_rate", None)
        for name in ("pixel_mean", "pixel_std"):
            object.__setattr__(self, name, tuple(float(value) for value in getattr(self, name)))
        self._check()

    def _check(self) -> None:
        for name, known in CHOICES.items():
            check_choice(name, getattr(self, name), known)
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"give either steps or epochs, not steps={self.steps} and epochs={self.epochs}")
        for name, least in LEAST.items():
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), least)
        for name in ("lr", "width"):
            check_number(name, getattr(self, name), above=0)
        for name in ("weight_decay", "log_floor", "orthonormal"):
            check_number(name, getattr(self, name), least=0)
        for name in ("momentum", "label_smoothing"):
            check_number(name, getattr(self, name), least=0, below=1)
        if self.other_rate is not None:
            check_number("other_rate", self.other_rate, above=0)
        if self.progressive_sizes is not None:
            object.__setattr__(self, "progressive_sizes", str(ImageSizes.parse(self.progressive_sizes)))
        if self.seed >= 2**SEED_BITS:
            raise ValueError(f"seed must be below 2^{SEED_BITS}, not {self.seed}")
        if not all(value > 0 for value in self.pixel_std):
            raise ValueError(f"pixel_std must be above 0, not {self.pixel_std}")
        if not self.decoupled or Operator.parse(self.operator).weighted:
            self._check_weighted()
        self._check_head()
        if self.weights is not None:
            self._check_pretrained(self.weights)
        if self.adversary is not None:
            self._check_adversary(as_adversary(self.adversary))

    def _check_adversary(self, adversary: Adversary) -> None:
        object.__setattr__(self, "adversary", str(adversary))
        if self.margin is not None and not adversary.takes_margins:
            raise ValueError(
                f"adversary={self.adversary!r} does not support margin={self.margin!r}: both define the loss"
            )

    def _check_pretrained(self, weights: str) -> None:
        if not self.model.startswith(f"{PREFIX}:"):
            raise ValueError(f"weights={weights!r} need a timm network, not {self.model!r}: use the model timm:<name>")
        if self.decoupled:
            calibratable(Operator.parse(self.operator))

    def _check_head(self) -> None:
        """Checks the options of a margin head, which replaces the classifier and defines the loss."""
        if self.feature_snapshots and self.features not in (2, 3):
            count = self.feature_snapshots
            raise ValueError(f"feature_snapshots={count} needs 2 or 3 features, not {self.features}: give features=2")
        if self.annealing is not None:
            check_choice("annealing", self.annealing, ANNEALINGS)
        names = ("margin_scale", "annealing", "interclass_filtering_threshold", "sample_classes", "features")
        given = {name: getattr(self, name) for name in names}
        if self.margin is None:
            if needless := [f"{name}={value!r}" for name, value in given.items() if value is not None]:
                raise ValueError(f"{needless[0]} needs a head with a margin: give a margin, such as a-softmax")
            return
        margin = as_margin(self.margin)
        object.__setattr__(self, "margin", str(margin))
        threshold = self.interclass_filtering_threshold
        if threshold is not None:
            check_number("interclass_filtering_threshold", threshold, above=0, most=1)
        if self.sample_classes is not None:
            check_number("sample_classes", self.sample_classes, above=0, most=1)
            # All classes are no sample.
            object.__setattr__(self, "sample_classes", None if self.sample_classes == 1 else self.sample_classes)
        # The loss of the margin ignores these values, which may come from the recipe.
        unsmoothed = margin.binary or threshold is not None or self.sample_classes is not None
        for name in ("log_floor", "label_smoothing") if unsmoothed else ("log_floor",):
            object.__setattr__(self, name, 0.0)
        if self.classifier is not None:
            raise ValueError(f"classifier={self.classifier!r} and margin={self.margin!r} exclude each other: give one")

    def _check_weighted(self) -> None:
        """Raises ValueError for options that change ||w||, which plain and weighted operators depend on."""
        for name in ("projection_every", "weighted_gradients"):
            if getattr(self, name) not in (0, "none"):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} needs an unweighted operator, not {self.operator!r}: "
                    f"use {name}={0 if name == 'projection_every' else 'none'!r}"
                )
        if self.optimizer in ON_SPHERE:
            raise ValueError(
                f"optimizer={self.optimizer!r} needs an unweighted operator, not {self.operator!r}: use sgd or muon"
            )

    @property
    def decoupled(self) -> bool:
        return not is_plain(self.operator)

    @property
    def layer_operator(self) -> Operator | str:
        """The operator of the layers; with pretrained weights of timm, its scale is learned per channel."""
        return calibratable(Operator.parse(self.operator)) if self.decoupled and self.weights else self.operator

    def described(self) -> dict[str, Any]:
        """Returns the config as JSON values, which `config_of` reads."""
        values = {declared.name: getattr(self, declared.name) for declared in dataclasses.fields(self)}
        schedule, augmentation = self.schedule, self.augmentation
        values["schedule"] = {"name": schedule.name, **dataclasses.asdict(schedule)}
        values["augmentation"] = dataclasses.asdict(augmentation)
        return json.loads(json.dumps(values))

    @property
    def hash(self) -> str:
        """A hash, in eight hexadecimal digits, of the values that differ from the defaults.

        New fields with default values therefore do not change it.
        """
        own, by_default = self.described(), defaults()
        changed = {name: value for name, value in own.items() if value != by_default[name]}
        changed["schedule"] = {"name": self.schedule.name, **_changed(self.schedule)}
        changed["augmentation"] = _changed(self.augmentation)
        return hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def name(self) -> str:
        """The name of the run, valid as the name of a folder."""
        # The model name of a custom network is more informative than the operator of some of its layers.
        operator = self.operator if self.network is None else None
        words = [word for word in (self.dataset, self.model, operator, self.margin, self.adversary) if word]
        name = "-".join(re.sub(r"[^A-Za-z0-9.-]+", "_", word).strip("_") for word in words)
        seed = f"-seed{self.seed}"
        # A leading dot, as a custom dataset may have in its name, would hide the folder.
        return name.lstrip(".")[: LONGEST_NAME - len(seed)] + seed


def _changed(made: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass that differ from their defaults."""
    given = {declared.name: (getattr(made, declared.name), declared.default) for declared in dataclasses.fields(made)}
    return {name: value for name, (value, default) in given.items() if value != default}


@cache
def defaults() -> Mapping[str, Any]:
    """Returns the default config as JSON values."""
    return RunConfig(epochs=1).described() | {"epochs": None}


def with_defaults(described: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the saved config of a record, with defaults for fields that its version did not have."""
    values = {**defaults(), **described}
    if isinstance(values["augmentation"], Mapping):
        values["augmentation"] = {**defaults()["augmentation"], **values["augmentation"]}
    return values


def config_of(described: Mapping[str, Any]) -> RunConfig:
    """Reads the saved config of a record."""
    values = dict(described)
    known = {declared.name for declared in dataclasses.fields(RunConfig)}
    if unknown_names := sorted(set(values) - known):
        raise ValueError(f"the config of the run has fields that this version of dcnet does not know: {unknown_names}")
    values["schedule"] = schedule_of(values["schedule"])
    values["augmentation"] = Augmentation(**values["augmentation"])
    return RunConfig(**values)
