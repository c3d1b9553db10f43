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

import dcnet
from dcnet import inference, models, report, training
from dcnet.cli import options
from dcnet.exit_codes import FAILED
from dcnet.terminal import print_json, visible

if TYPE_CHECKING:
    from torch import nn

    from dcnet.training.conversion import Source


@dataclass(frozen=True, kw_only=True)
class Command(options.JsonOption, options.RunsOptions):
    """Convert a trained network to another operator, or export it as an ONNX file.

    With another operator the weights stay the same, but the layers compute something else. Fine-tune the new run with
    `dcnet train --pretrained`, and evaluate its accuracy.

    The ONNX file has batch normalization folded in, and takes pixels in [0, 1]. Its outputs in onnxruntime are compared
    with those of torch. Its metadata has the names of the classes and the preprocessing of images.
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_OR_FILE")]
    """A run by its folder or name, or a file of weights in its folder, such as a checkpoint."""

    operator: Annotated[str | None, tyro.conf.arg(metavar="SPEC", help_behavior_hint="(this, or --onnx)")] = None
    """The new operator: conv for a plain network, tanh-cos, "seg(slope=0.2)-sqcos+linear", ..."""

    onnx: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(this, or --operator)")] = None
    """The ONNX file to write."""

    out: Annotated[Path | None, options.arg("FOLDER", "next to the run")] = None
    """The folder of the new run, for --operator."""

    start: Literal["as-is", "calibrated"] = "as-is"
    """How to convert a plain network: as-is only changes the operator; calibrated also sets radius and scale of each
    layer on some training images, so that outputs keep their norms, and makes them learnable."""

    data_dir: options.DataFolder = None
    """The folder of the datasets, for --start calibrated."""

    def prepare(self) -> Callable[[], int]:
        if (self.operator is None) == (self.onnx is None):
            raise ValueError("give either --operator, the new operator, or --onnx, the file to write")
        source = training.conversion.Source.find(self.source, self.root())
        with options.explain_record_errors(source.run):
            return self._to_operator(source) if self.operator is not None else self._to_onnx(source)

    def _to_operator(self, source: Source) -> Callable[[], int]:
        spec = options.one_operator(str(self.operator))
        as_is = self.start == "as-is"
        if as_is:
            converted = training.conversion.convert_as_is(source, spec)
        else:
            converted = training.conversion.convert_calibrated(source, spec, self.data_dir)
        run = converted.free_folder(self.out)
        options.writable(str(run.record_file))

        def work() -> int:
            converted.write(run)
            operator = converted.config.operator
            found = {"out": str(run.folder), "operator": operator, "new": converted.new, "calibrated": not as_is}
            self._print(found, _operator_text)
            return 0

        return work

    def _to_onnx(self, source: Source) -> Callable[[], int]:
        for option, given in {"--out": self.out is not None, "--start calibrated": self.start != "as-is"}.items():
            if given:
                raise ValueError(f"{option} needs --operator, and cannot be used with --onnx {str(self.onnx)!r}")
        missing = [name for name in ("onnx", "onnxruntime", "onnxscript") if importlib.util.find_spec(name) is None]
        if missing:
            raise ValueError(f"--onnx needs {' and '.join(missing)}: install dcnet[onnx]")
        model = source.model()
        _check_norms(model, source)
        path = options.output_file("--onnx", Path(str(self.onnx)), (".onnx",))
        return lambda: self._export(model, source, path)

    def _export(self, model: nn.Module, source: Source, path: Path) -> int:
        _, channels, size = source.shape
        try:
            # torch prints to stdout during the export.
            with contextlib.redirect_stdout(sys.stderr):
                found = report.evaluation_report.export(model, (channels, size, size), path, _metadata(model, source))
        except (ArithmeticError, RuntimeError) as error:
            print(f"dcnet convert: {visible(error)}", file=sys.stderr)
            return FAILED
        self._print({"out": str(path), **found}, _onnx_text)
        return 0

    def _print(self, found: dict[str, Any], text: Callable[[dict[str, Any]], str]) -> None:
        if self.json:
            print_json(found)
        else:
            print(visible(text(found), kept="\n"))


def _metadata(model: nn.Module, source: Source) -> dict[str, Any]:
    """Returns the metadata that a program needs to predict like `dcnet predict`."""
    config = source.record.config
    about = {name: config[name] for name in ("dataset", "model", "operator")}
    steps = training.image_input.ImageInput.of(source.record).described() | _normalization(model)
    return {"classes": source.record.data.classes, "preprocessing": steps, "dcnet": dcnet.__version__, **about}


def _normalization(model: nn.Module) -> dict[str, Any]:
    """Describes the normalization of pixels inside the network."""
    # A subclass may normalize each image differently.
    if type(model) is not models.blocks.Normalized:
        return {}
    own = {name: getattr(model, name).flatten().tolist() for name in ("mean", "std")}
    return {"normalization_in_network": own}


def _check_norms(model: nn.Module, source: Source) -> None:
    try:
        inference.fold_network.check_mean_norms(model)
    except ValueError:
        hint = f"train it first, with `dcnet train --pretrained {shlex.quote(str(source.run.folder))}`"
        raise ValueError(f"{source.run.folder.name!r} was converted but not trained: {hint}") from None


def _operator_text(found: dict[str, Any]) -> str:
    lines = [f"wrote {found['out']}"]
    if found["new"]:
        lines.append(f"{len(found['new'])} tensors are new, such as {found['new'][0]}")
    if found["calibrated"]:
        lines.append(f"to keep the calibration, train with --operators {shlex.quote(found['operator'])}")
    lines.append("the layers compute something else with the same weights, so evaluate the accuracy:")
    return "\n".join([*lines, f"  dcnet evaluate {shlex.quote(found['out'])}"])


def _onnx_text(found: dict[str, Any]) -> str:
    return (
        f"wrote {found['out']}, {found['bytes'] / 1024:,.0f} KiB\nonnxruntime and torch differ by at most "
        f"{found['largest_difference']:.1e} in logits of up to {found['largest_logit']:.3g}"
    )
