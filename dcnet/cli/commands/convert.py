"""`dcnet convert`."""

from __future__ import annotations

import contextlib
import importlib.util
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from dcnet.cli.run_options import DataFolder, RunsOptions, described
from dcnet.escapes import visible

if TYPE_CHECKING:
    from torch import nn

    from dcnet.cli.convert_options import Source

FAILED = 1


@dataclass(frozen=True, kw_only=True)
class Command(RunsOptions):
    """Give the network of a run another operator, or write it as an ONNX file.

    With another operator the weights stay as they are, and the layers compute something else with them: the new run is
    a start for `dcnet train --pretrained`, and its accuracy has to be looked at.

    An ONNX file has the batch normalisation folded in, takes pixels from 0 to 1, and is compared with torch in
    onnxruntime. Its metadata has the names of the classes and what is done with an image first.
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_OR_FILE")]
    """A run by its folder or name, or a file of weights in its folder, such as one of its checkpoints."""

    operator: Annotated[str | None, tyro.conf.arg(metavar="SPEC", help_behavior_hint="(this, or --onnx)")] = None
    """The operator to change to: conv for a plain network, tanh-cos, "seg(slope=0.2)-sqcos+linear", ..."""

    onnx: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(this, or --operator)")] = None
    """The ONNX file to write."""

    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="(default: beside the run)")] = None
    """The folder of the new run, for --operator."""

    start: Literal["as-is", "calibrated"] = "as-is"
    """What a plain network becomes: calibrated sets radius and scale of each layer by some training images, so that
    its channels are as large as they were, and they are learned from then on."""

    data_dir: DataFolder = None
    """Where the datasets are, for --start calibrated."""

    json: bool = False
    """Print one JSON document, and nothing else."""

    def prepare(self) -> Callable[[], int]:
        from dcnet.cli.convert_options import find_source

        if (self.operator is None) == (self.onnx is None):
            raise ValueError("give either --operator, what to change to, or --onnx, the file to write")
        source = find_source(self.source, self.root())
        with described(source.run):
            return self._to_operator(source) if self.operator is not None else self._to_onnx(source)

    def _to_operator(self, source: Source) -> Callable[[], int]:
        from dcnet.cli.calibrate_options import calibrated
        from dcnet.cli.convert_options import free_folder, with_operator, write_run
        from dcnet.report.options import one_operator
        from dcnet.training.build import statistics_behind
        from dcnet.training.statistics import forget_statistics_

        spec = one_operator(str(self.operator))
        as_is = self.start == "as-is"
        config, model, new = with_operator(source, spec) if as_is else calibrated(source, spec, self.data_dir)
        statistics = config.operator
        if as_is:
            forget_statistics_(model)
            statistics = statistics_behind(str(source.weights))
        run = free_folder(self.out, source, config)

        def work() -> int:
            write_run(run, config, model, source, statistics)
            found = {"out": str(run.folder), "operator": config.operator, "new": new, "calibrated": not as_is}
            self._tell(found, _operator_words)
            return 0

        return work

    def _to_onnx(self, source: Source) -> Callable[[], int]:
        from dcnet.report.options import writable

        for option, given in {"--out": self.out is not None, "--start calibrated": self.start != "as-is"}.items():
            if given:
                raise ValueError(f"{option} goes with --operator, and has no meaning for --onnx {str(self.onnx)!r}")
        missing = [name for name in ("onnx", "onnxruntime", "onnxscript") if importlib.util.find_spec(name) is None]
        if missing:
            raise ValueError(f"--onnx needs {' and '.join(missing)}: install dcnet with its extra, dcnet[onnx]")
        model = source.model()
        _check_norms(model, source)
        path = writable(str(self.onnx))
        return lambda: self._export(model, source, path)

    def _export(self, model: nn.Module, source: Source, path: Path) -> int:
        from dcnet.report.exported import export

        _, channels, size = source.shape
        try:
            # Whatever torch says while it exports is not what was asked for.
            with contextlib.redirect_stdout(sys.stderr):
                found = export(model, (channels, size, size), path, _metadata(model, source))
        except (ArithmeticError, RuntimeError) as error:
            print(f"dcnet convert: {visible(error)}", file=sys.stderr)
            return FAILED
        self._tell({"out": str(path), **found}, _onnx_words)
        return 0

    def _tell(self, found: dict[str, Any], words: Callable[[dict[str, Any]], str]) -> None:
        from dcnet.report.listing import print_json

        if self.json:
            print_json(found)
        else:
            print(visible(words(found), kept="\n"))


def _metadata(model: nn.Module, source: Source) -> dict[str, Any]:
    """What a program needs to know beside the network to predict as `dcnet predict` does."""
    import dcnet
    from dcnet.cli.image_options import preprocessing

    config = source.record["config"]
    about = {name: config[name] for name in ("dataset", "model", "operator")}
    steps = preprocessing(source.record) | _normalization(model)
    return {"classes": source.record["data"]["classes"], "preprocessing": steps, "dcnet": dcnet.__version__, **about}


def _normalization(model: nn.Module) -> dict[str, Any]:
    """What the network itself does with pixels from 0 to 1, for whoever wants to know."""
    from dcnet.models.normalized import Normalized

    if not isinstance(model, Normalized):
        return {}
    own = {name: getattr(model, name).flatten().tolist() for name in ("mean", "std")}
    return {"normalization_in_network": own}


def _check_norms(model: nn.Module, source: Source) -> None:
    from dcnet.folding import check_mean_norms

    try:
        check_mean_norms(model)
    except ValueError:
        hint = f"train it first, with `dcnet train --pretrained {shlex.quote(str(source.run.folder))}`"
        raise ValueError(f"{source.run.folder.name!r} has seen no data since it has its operator: {hint}") from None


def _operator_words(found: dict[str, Any]) -> str:
    lines = [f"wrote {found['out']}"]
    if found["new"]:
        lines.append(f"not from the run: {len(found['new'])} tensors, such as {found['new'][0]}")
    if found["calibrated"]:
        lines.append(f"to go on with what is calibrated, train it with --operators {shlex.quote(found['operator'])}")
    lines.append("the layers compute something else with the same weights, so look at the accuracy:")
    return "\n".join([*lines, f"  dcnet evaluate {shlex.quote(found['out'])}"])


def _onnx_words(found: dict[str, Any]) -> str:
    return (
        f"wrote {found['out']}, {found['bytes'] / 1024:,.0f} KiB\nonnxruntime and torch differ by at most "
        f"{found['largest_difference']:.1e} in logits of up to {found['largest_logit']:.3g}"
    )
