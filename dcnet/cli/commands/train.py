"""`dcnet train`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from dcnet.cli.resume_options import begun, run_of, weights_of
from dcnet.cli.run_options import check_runs_to_be
from dcnet.cli.train_options import MachineOptions, NetworkOptions, RecipeOptions, given

if TYPE_CHECKING:
    from dcnet.training import Execution, Run, RunConfig
    from dcnet.training.identity import Data
    from dcnet.training.session import Session

AUGMENTATION = ("pad", "flip", "cutout")


@dataclass(frozen=True, kw_only=True)
class Command:
    """Train networks, and compare them.

    Without options a small decoupled network learns to read digits, in seconds. Each run has a folder with its record,
    its curves and its weights; what is done already is not done again. Ctrl-C stops after the step, and the same
    command, or --resume, goes on to the same weights, to the last bit on the same CPU.

    Three to begin with:

    dcnet train --operators conv tanh-cos --seeds 0 1 2

    dcnet train --recipe paper-cifar --operators conv tanh-cos seg-cos --compile

    dcnet train --recipe paper-cifar --dataset cifar10 --model cnn9 --operators seg-sqcos --activation none
    """

    recipe: Annotated[str, tyro.conf.arg(metavar="NAME")] = "digits"
    """Where all values come from that are not given; see `dcnet list recipes`."""

    operators: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SPEC ...")] = ("tanh-cos",)
    """One network for each: conv for a plain one, tanh-cos, "seg(slope=0.2)-sqcos+linear", ..."""

    seeds: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N ...")] = (0,)
    """One run of each network for each seed."""

    resume: Annotated[str | None, tyro.conf.arg(metavar="RUN", help_behavior_hint="(optional)")] = None
    """Go on with this run as it was begun, whatever else is given about it."""

    again: bool = False
    """Train anew what is done already."""

    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(optional)")] = None
    """Draw the curves of all runs into this file, .png or .svg."""

    json: bool = False
    """Print what came out as JSON, and all else to stderr."""

    network: tyro.conf.OmitArgPrefixes[NetworkOptions] = field(default_factory=NetworkOptions)
    training: tyro.conf.OmitArgPrefixes[RecipeOptions] = field(default_factory=RecipeOptions)
    machine: tyro.conf.OmitArgPrefixes[MachineOptions] = field(default_factory=MachineOptions)

    def prepare(self) -> Callable[[], int]:
        from dcnet.cli.bench_options import check_plot
        from dcnet.report.options import writable
        from dcnet.training.session import Session

        datasets: dict[str, Data] = {}
        work = self._work(datasets)
        if self.plot is not None:
            check_plot(self.plot)
            writable(str(self.plot))
        session = Session(
            work, self._execution(), self.again, self.json, datasets, skip_bad_images=self.machine.skip_bad_images
        )
        return lambda: self._draw(session, session.run())

    def _draw(self, session: Session, code: int) -> int:
        """Draws what was trained, in the first of several processes."""
        if self.plot is not None and session.finished and session.is_first:
            from dcnet.report import plots
            from dcnet.report.curves import run_curves

            plots.save(run_curves(session.finished), self.plot)
            session.say(f"wrote {self.plot}")
        return code

    def _work(self, datasets: dict[str, Data]) -> list[tuple[RunConfig, Run]]:
        """What to train, and in which folders; keeps what has to be loaded to know that."""

        if self.resume is not None:
            if self.again:
                raise ValueError("--resume goes on with a run, and --again trains it anew: give one of them")
            return [begun(self.resume, self.machine.runs)]
        check_runs_to_be(self.machine.runs)
        return [self._placed(config, datasets) for config in self._configs()]

    def _placed(self, config: RunConfig, datasets: dict[str, Data]) -> tuple[RunConfig, Run]:
        from dcnet.data import load_dataset
        from dcnet.training import Run
        from dcnet.training.identity import from_folder

        name = config.dataset
        if not from_folder(name):
            return config, Run.of(config, self.machine.runs)
        if name not in datasets:
            datasets[name] = load_dataset(name, self.machine.data_dir)
        return run_of(config, datasets[name], self.machine.runs)

    def _configs(self) -> list[RunConfig]:
        """What to train, and nothing twice, however its operator may be written."""
        from dcnet.training import recipe

        # Such as an empty variable of a shell gives, and not what somebody means who wants a network.
        for option, values in {"--operators": self.operators, "--seeds": self.seeds}.items():
            if not values:
                raise ValueError(f"{option} names none, so that there is nothing to train: give one or more")
        changes = self._changes()
        pairs = [(seed, operator) for seed in self.seeds for operator in self.operators]
        try:
            configs = [recipe(self.recipe, **changes, operator=operator, seed=seed) for seed, operator in pairs]
        except ImportError as error:
            raise ValueError(str(error)) from None
        return list(dict.fromkeys(configs))

    def _changes(self) -> dict[str, Any]:
        """The values that are not the recipe's."""
        from dcnet.training import recipe
        from dcnet.training.config import OWN_WEIGHTS
        from dcnet.training.schedules import SCHEDULES

        changes = given(self.network) | given(self.training)
        if "pretrained" in changes:
            changes["pretrained"] = weights_of(changes["pretrained"], self.machine.runs)
        if changes.get("weights", OWN_WEIGHTS) != OWN_WEIGHTS and not Path(changes["weights"]).is_file():
            raise ValueError(
                f"--weights is {changes['weights']!r}, and there is no such file: give one in timm's naming, or timm"
            )
        drawn = {name: changes.pop(name) for name in AUGMENTATION if name in changes}
        if drawn:
            changes["augmentation"] = dataclasses.replace(recipe(self.recipe).augmentation, **drawn)
        if "margin_scale" in changes:
            changes["margin_scale"] = _number_or_word(changes["margin_scale"])
        if "schedule" in changes:
            changes["schedule"] = SCHEDULES[changes["schedule"]]()
        if "steps" in changes and "epochs" in changes:
            steps, epochs = changes["steps"], changes["epochs"]
            raise ValueError(f"--steps {steps} and --epochs {epochs} exclude each other: give one of them")
        return changes

    def _execution(self) -> Execution:
        from dcnet.cli.bench_options import at_least, chosen_device
        from dcnet.training import Execution

        options = self.machine
        at_least(0, "--workers", options.workers)
        if options.checkpoint_every is not None:
            at_least(1, "--checkpoint-every", options.checkpoint_every)
        return Execution(
            device=chosen_device(options.device),
            compile=options.compile,
            graph=False if options.no_graph else None,
            data_dir=options.data_dir,
            workers=options.workers,
            checkpoint_every=options.checkpoint_every,
            tracker=options.tracker,
        )


def _number_or_word(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
