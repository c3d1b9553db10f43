"""`dcnet train`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from dcnet import data, report, training
from dcnet.cli import options

if TYPE_CHECKING:
    from dcnet.training import Execution, Run, RunConfig
    from dcnet.training.identity import Data
    from dcnet.training.session import Session

AUGMENTATION = ("pad", "flip", "cutout", "brightness", "contrast", "alternate_flips")


def by_recipe(metavar: str) -> Any:
    """Returns the help settings of an option whose default is the value of the recipe."""
    return options.arg(metavar, "by recipe")


Whole = Annotated[int | None, by_recipe("N")]
Decimal = Annotated[float | None, by_recipe("NUMBER")]
Name = Annotated[str | None, by_recipe("NAME")]
Spec = Annotated[str | None, by_recipe("SPEC")]


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """The network and the data."""

    dataset: Name = None
    """One of `dcnet list datasets`."""

    train_images: Whole = None
    """Use a stratified subset of this many training images, drawn with the seed of the run."""

    model: Name = None
    """One of `dcnet list models`, or timm:<name>."""

    width: Annotated[float | None, by_recipe("FACTOR")] = None
    """Multiplies the channels of all layers."""

    norm: Annotated[
        Literal["batch", "group", "layer", "rms", "none"] | None, by_recipe("{batch,group,layer,rms,none}")
    ] = None
    """The normalization after each layer; in a transformer, before attention and MLP."""

    activation: Annotated[Literal["relu", "prelu", "gelu", "none"] | None, by_recipe("{relu,prelu,gelu,none}")] = None
    """The activation after each layer."""

    classifier: Annotated[Literal["linear", "normalized"] | None, by_recipe("{linear,normalized}")] = None
    """The last layer; normalized is the weight-normalized softmax."""

    margin: Spec = None
    """Use a head with this margin instead of the classifier: a-softmax, "arcface(m=0.3)", see `dcnet list margins`."""

    margin_scale: Annotated[str | None, by_recipe("NUMBER")] = None
    """The scale of the margin head: a number, norm or learned."""

    annealing: Annotated[Literal["auto", "none"] | None, by_recipe("{auto,none}")] = None
    """The annealing of the margin: auto depends on the angles, none applies the full margin from the start."""

    interclass_filtering_threshold: Decimal = None
    """The loss of the margin head ignores other classes with a cosine above this number, in (0, 1]."""

    sample_classes: Decimal = None
    """The margin head uses this fraction of its classes in each step: those of the batch, and others at random."""

    features: Whole = None
    """The number of features of the margin head; 2 or 3 can be drawn."""

    feature_snapshots: Whole = None
    """Store the features (2 or 3) of this many test images at each evaluation, for `dcnet plot features --animate`."""

    norm_momentum: Decimal = None
    """The weight of the newest batch in the statistics of batch normalization."""

    init_variance: Decimal = None
    """The variance of initial weights, times the size of a filter: 2 keeps the variance with ReLU, 1 without."""

    image_size: Whole = None
    """The side of the crops from a folder of images, and of the input of a timm vision transformer."""

    progressive_sizes: Spec = None
    """Smaller training images first: 16:0.4,24:0.7 for 16 pixels up to 40 % of the steps, 24 up to 70 %."""

    pretrained: Annotated[str | None, by_recipe("RUN")] = None
    """Start from the weights of this run, or from a file in its folder, such as a checkpoint."""

    weights: Annotated[str | None, by_recipe("FILE")] = None
    """Start a timm network from this file with timm's names, .safetensors or .pth; timm for timm's own weights."""


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """The training."""

    steps: Whole = None
    """Optimizer steps."""

    epochs: Whole = None
    """Passes over the training images, instead of --steps."""

    batch_size: Whole = None
    """Images per step, over all processes."""

    optimizer: Annotated[
        Literal["adam", "adamw", "sgd", "muon", "sphere-sgd"] | None, by_recipe("{adam,adamw,sgd,muon,sphere-sgd}")
    ] = None
    """The optimizer; muon and sphere-sgd update filters only, and adamw updates all other parameters."""

    lr: Decimal = None
    """The initial learning rate; the angle of a step, in radians, for sphere-sgd."""

    momentum: Decimal = None
    """The momentum of sgd, muon and sphere-sgd."""

    other_rate: Decimal = None
    """Multiplies the learning rate of parameters that are not filters, for muon and sphere-sgd."""

    weight_decay: Decimal = None
    """L2 decay of all parameters except unweighted decoupled filters and learned constants of operators."""

    decay_weighted: Annotated[bool | None, by_recipe("{True,False}")] = None
    """Apply --weight-decay to the filters of weighted operators."""

    schedule: Annotated[
        Literal["step", "plateau", "cosine", "linear", "constant"] | None,
        by_recipe("{step,plateau,cosine,linear,constant}"),
    ] = None
    """The learning-rate schedule; step multiplies the rate by 0.1 after one half and three quarters of the steps."""

    label_smoothing: Decimal = None
    """The share of the label that is spread over all classes; margins sphereface2 and uniface do not support it."""

    log_floor: Decimal = None
    """Added to the probability inside the logarithm of the loss; not supported with a margin."""

    pad: Whole = None
    """Pad every side by this many pixels and crop at random."""

    flip: Annotated[bool | None, by_recipe("{True,False}")] = None
    """Flip images horizontally at random."""

    cutout: Whole = None
    """The side of a gray square at a random position in each image."""

    brightness: Decimal = None
    """The largest value that is added to all pixels of an image at random, or subtracted; pixels are in [0, 1]."""

    contrast: Decimal = None
    """The largest relative change of the contrast of an image at random; 0.8 for 0.2 to 1.8 times the contrast."""

    standardize: Annotated[
        Literal["none", "image", "channel", "scale"] | None, by_recipe("{none,image,channel,scale}")
    ] = None
    """Standardize each image, or each of its channels, to mean 0 and deviation 1, or scale it to a mean square of 1,
    instead of the same normalization for all images."""

    alternate_flips: Annotated[bool | None, by_recipe("{True,False}")] = None
    """With --flip, flip an image in every second epoch, instead of at random."""

    adversary: Spec = None
    """Adversarial training: fgsm, n-fgsm, "pgd(epsilon=8/255,steps=7)" or "trades(beta=6)"."""

    projection_every: Whole = None
    """Steps between weight projections: 0 for none, 1 for a projection in every step."""

    weighted_gradients: Annotated[Literal["none", "gradient", "update"] | None, by_recipe("{none,gradient,update}")] = (
        None
    )
    """Multiply the gradients, or the updates, of filters by their norms."""

    orthonormal: Decimal = None
    """The coefficient of the orthonormal constraint in the loss."""

    precision: Annotated[Literal["float32", "bfloat16"] | None, by_recipe("{float32,bfloat16}")] = None
    """The precision of the computation; weights stay in float32."""

    evaluate_every: Whole = None
    """Steps between evaluations on the test set, instead of one per epoch."""


@dataclass(frozen=True, kw_only=True)
class MachineOptions(options.DataOptions):
    """Where and how to compute; results do not depend on it, except for rounding."""

    runs: options.RunsFolder = None
    """The folder that contains the folders of runs."""

    skip_bad_images: bool = False
    """Skip images of a folder that cannot be read; they are reported, and listed in the record."""

    compile: bool = False
    """Use torch.compile, which takes up to a minute at the start and pays off in long runs on a GPU."""

    no_graph: bool = False
    """Do not replay steps as a CUDA graph."""

    checkpoint_every: Annotated[int | None, options.arg("N", "one checkpoint a minute")] = None
    """Steps between checkpoints."""

    tracker: Annotated[str | None, options.arg("NAME")] = None
    """A tracker of accelerate, such as tensorboard or wandb."""

    shard_head: Annotated[bool | None, options.arg("{True,False}", "False, or as the run was started")] = None
    """Divide the classes of the margin head among the processes of torchrun, for many classes."""

    refresh_batches: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Also evaluate with the statistics of batch normalization recomputed from N training batches, for curves."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """Train networks and compare them.

    Without options, trains a small decoupled network on digits, in seconds. Each run has a folder with its record,
    its curves and its weights; a finished run is not trained again. After Ctrl-C, the same command or --resume
    continues; the weights are the same as without the interruption, to the last bit on the same CPU.

    Examples:

    dcnet train --operators conv tanh-cos --seeds 0 1 2

    dcnet train --recipe paper-cifar --operators conv tanh-cos seg-cos --compile

    dcnet train --recipe paper-cifar --dataset cifar10 --model cnn9 --operators seg-sqcos --activation none
    """

    recipe: Annotated[str, tyro.conf.arg(metavar="NAME")] = "digits"
    """The recipe, which provides all values that are not given; see `dcnet list recipes`."""

    operators: options.Specs = ("tanh-cos",)
    """Train a network per operator: conv for a plain one, tanh-cos, "seg(slope=0.2)-sqcos+linear", ..."""

    seeds: options.Numbers = (0,)
    """Train each network once per seed."""

    resume: Annotated[str | None, options.arg("RUN")] = None
    """Resume this run with its saved config; other training options are ignored."""

    again: bool = False
    """Train finished runs again."""

    plot: options.OptionalFile = None
    """Draw the curves of all runs to this file, .png or .svg."""

    json: bool = False
    """Print the results as JSON, and everything else to stderr."""

    network: tyro.conf.OmitArgPrefixes[NetworkOptions] = field(default_factory=NetworkOptions)
    training: tyro.conf.OmitArgPrefixes[RecipeOptions] = field(default_factory=RecipeOptions)
    machine: tyro.conf.OmitArgPrefixes[MachineOptions] = field(default_factory=MachineOptions)

    def prepare(self) -> Callable[[], int]:
        datasets: dict[str, Data] = {}
        work = self._work(datasets)
        if self.plot is not None:
            options.output_file("--plot", self.plot)
        skip = self.machine.skip_bad_images
        session = training.session.Session(work, self._execution(), self.again, self.json, datasets, skip)
        return lambda: self._draw(session, session.run())

    def _draw(self, session: Session, code: int) -> int:
        """Draws the curves of the finished runs, in the first process only; returns the exit code."""
        if self.plot is not None and session.finished and session.is_first:
            report.drawing.save(report.curves.run_curves(session.finished), self.plot)
            session.progress.on_message(f"wrote {self.plot}")
        return code

    def _work(self, datasets: dict[str, Data]) -> list[tuple[RunConfig, Run]]:
        """Returns the configs and their runs; adds datasets that were loaded to `datasets`."""
        if self.resume is not None:
            if self.again:
                raise ValueError("--resume and --again exclude each other: give one of them")
            return [_resumed(self.resume, self.machine.runs)]
        options.check_new_runs_folder(self.machine.runs)
        return [self._with_run(config, datasets) for config in self._configs()]

    def _with_run(self, config: RunConfig, datasets: dict[str, Data]) -> tuple[RunConfig, Run]:
        name = config.dataset
        if not training.identity.from_folder(name):
            return config, training.Run.of(config, self.machine.runs)
        if name not in datasets:
            datasets[name] = data.load_dataset(name, self.machine.data_dir)
        return _with_data(config, datasets[name], self.machine.runs)

    def _configs(self) -> list[RunConfig]:
        """Returns the configs without duplicates, even if an operator is given in several spellings."""
        for option, values in {"--operators": self.operators, "--seeds": self.seeds}.items():
            if not values:
                # For example, from an empty shell variable.
                raise ValueError(f"{option} is empty, so there is nothing to train: give one or more")
        changes = self._changes()
        pairs = [(seed, operator) for seed in self.seeds for operator in self.operators]
        try:
            configs = [training.recipe(self.recipe, **changes, operator=spec, seed=seed) for seed, spec in pairs]
        except ImportError as error:
            raise ValueError(str(error)) from None
        return list(dict.fromkeys(configs))

    def _changes(self) -> dict[str, Any]:
        """Returns the values that replace those of the recipe."""
        changes = _given(self.network) | _given(self.training)
        if "steps" in changes and "epochs" in changes:
            steps, epochs = changes["steps"], changes["epochs"]
            raise ValueError(f"--steps {steps} and --epochs {epochs} exclude each other: give one of them")
        if "pretrained" in changes:
            changes["pretrained"] = _pretrained(changes["pretrained"], self.machine.runs)
        if "weights" in changes:
            _check_weights(changes["weights"])
        drawn = {name: changes.pop(name) for name in AUGMENTATION if name in changes}
        if drawn:
            changes["augmentation"] = dataclasses.replace(training.recipe(self.recipe).augmentation, **drawn)
        if "margin_scale" in changes:
            changes["margin_scale"] = _number_or_text(changes["margin_scale"])
        if "schedule" in changes:
            changes["schedule"] = training.schedules.SCHEDULES[changes["schedule"]]()
        return changes

    def _execution(self) -> Execution:
        machine = self.machine
        options.check_at_least(1, "--checkpoint-every", machine.checkpoint_every)
        options.check_at_least(0, "--refresh-batches", machine.refresh_batches)
        return training.Execution(
            device=machine.chosen_device(),
            compile=machine.compile,
            graph=False if machine.no_graph else None,
            data_dir=machine.data_dir,
            workers=machine.chosen_workers(),
            checkpoint_every=machine.checkpoint_every,
            tracker=machine.tracker,
            shard_head=machine.shard_head,
            refresh_batches=machine.refresh_batches,
        )


def _given(options: Any) -> dict[str, Any]:
    """Returns the options that were given, by name."""
    values = {declared.name: getattr(options, declared.name) for declared in fields(options)}
    return {name: value for name, value in values.items() if value is not None}


def _check_weights(weights: str) -> None:
    if weights != training.config.OWN_WEIGHTS and not Path(weights).is_file():
        raise ValueError(f"--weights must be a file with timm's names, or timm; there is no file {weights!r}")


def _number_or_text(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _resumed(name: str, root: Path | None) -> tuple[RunConfig, Run]:
    """Finds the run to resume, and returns its saved config and the run."""
    run = training.find_run(name, root)
    record = run.record()
    if record.status == training.conversion.STATUS:
        raise ValueError(
            f"the run {name!r} was converted but not trained, so it cannot be resumed: give it to --pretrained"
        )
    training.identity.check_buildable(record, run.folder.name)
    with options.explain_record_errors(run):
        return record.run_config(), run


def _with_data(config: RunConfig, dataset: Data, root: Path | None) -> tuple[RunConfig, Run]:
    """Returns the config with the fingerprint of a user's folder, and its run.

    An older run whose config has no fingerprint is returned instead if its record describes the same images.
    """
    identity = training.identity
    own, older = identity.with_data(config, dataset), training.Run.of(config, root)
    run = training.Run.of(own, root)
    if not run.exists and older.exists and identity.same_data(older.record().data, identity.describe_data(dataset)):
        return config, older
    return own, run


def _pretrained(name: str, root: Path | None) -> str:
    """Returns the folder of a run of this name, or the given path."""
    if not name:
        # For example, from an empty shell variable; the network would be trained from scratch.
        raise ValueError("--pretrained is '': give a finished run, or a file in its folder")
    names = [run.folder.name for run in training.all_runs(root)]
    if Path(name).exists() or not any(known.startswith(name) or known.endswith(name) for known in names):
        return name
    return str(training.find_run(name, root).folder)
