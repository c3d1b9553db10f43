"""Decoupled networks for other runtimes: a torch.export program, or an ONNX file that was compared with torch first."""

import importlib
import importlib.util
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dcnet.files import write_atomically
from dcnet.folding import check_mean_norms

# The oldest that torch.onnx writes: every runtime that reads a newer one reads it too.
OPSET = 18
# The largest difference that is rounding, as a part of the largest value; of float16 it is four of its steps.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3}
# A protocol buffer holds no more, and the file is to be one.
LARGEST_FILE = 2**31 - 1


def export_program(model: nn.Module, example_input: Tensor, dynamic_batch: bool = True) -> torch.export.ExportedProgram:
    """The model in evaluation as a torch.export program, for batches of any size or of the example's alone.

    Args:
        model: takes one tensor; it is left as it is.
        example_input: a batch of the shape, dtype and device that the program is for.
        dynamic_batch: whether the first dimension may be of any size.
    """
    check_mean_norms(model)
    shape = list(example_input.shape) if isinstance(example_input, Tensor) else []
    if not shape or shape[0] == 0:
        found = f"one of shape {shape}" if isinstance(example_input, Tensor) else f"a {type(example_input).__name__}"
        raise TypeError(f"example_input must be one tensor with a batch of 1 or more, not {found}")
    # torch.export takes a batch of 1 for a constant.
    alone = dynamic_batch and len(example_input) == 1
    traced = torch.cat([example_input, example_input]) if alone else example_input
    # What torch.compile wraps a model in has no argument by name, whose first dimension could be of any size.
    model = getattr(model, "_orig_mod", model)
    with _in_evaluation(model):
        return torch.export.export(model, (traced.detach(),), dynamic_shapes=_shapes(dynamic_batch))


def export_onnx(
    model: nn.Module,
    example_input: Tensor,
    path: Path | str,
    dynamic_batch: bool = True,
    opset: int = OPSET,
    check: bool = True,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Writes the model in evaluation as one ONNX file, after onnxruntime gave the same results as torch.

    `dcnet.fold` before it makes the smaller and faster file.

    Args:
        model: takes one tensor; it is left as it is.
        example_input: a batch of the shape, dtype and device that the model is for.
        path: the file, which is either written in whole or left as it was.
        dynamic_batch: whether the first dimension may be of any size.
        opset: the version of ONNX's operators.
        check: whether to compare; another batch size is compared, too, where the batch is dynamic.
        metadata: values by name that the file has beside the network, such as the names of the classes. A value that is
            not text is written as JSON; onnxruntime gives them as `session.get_modelmeta().custom_metadata_map`.
    """
    if opset < OPSET:
        raise ValueError(f"opset must be {OPSET} or more, not {opset}")
    if Path(path).is_dir():
        raise ValueError(f"path must be a file, and {str(path)!r} is a folder")
    _require("onnx", "onnxscript", *["onnxruntime"] * check)
    described = _described(metadata or {})
    proto = _translate(export_program(model, example_input, dynamic_batch), dynamic_batch, opset)
    for name, text in described.items():
        proto.metadata_props.add(key=name, value=text)
    content = _serialize(proto)
    if check:
        batches = [example_input, torch.cat([example_input, example_input[:1]])] if dynamic_batch else [example_input]
        _compare(model, content, [batch.detach() for batch in batches])
    write_atomically(path, content)


def _described(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The values as texts; a ValueError for one that JSON does not hold."""
    try:
        return {
            str(name): value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)
            for name, value in metadata.items()
        }
    except (TypeError, ValueError) as error:
        raise ValueError(f"metadata must be text, or what JSON holds: {error}") from None


def _shapes(dynamic_batch: bool) -> tuple[dict[int, Any]] | None:
    return ({0: torch.export.Dim("batch", min=1)},) if dynamic_batch else None


def _translate(program: torch.export.ExportedProgram, dynamic_batch: bool, opset: int) -> Any:
    """The program as an ONNX protocol buffer, with an input named `input` and a first dimension named `batch`."""
    options: dict[str, Any] = {"dynamic_shapes": _shapes(dynamic_batch), "opset_version": opset, "verbose": False}
    with warnings.catch_warnings():
        # What torch says of its own code, and of onnxscript's, is not for whoever exports.
        warnings.simplefilter("ignore", category=DeprecationWarning)
        warnings.simplefilter("ignore", category=FutureWarning)
        exported = torch.onnx.export(program, (), dynamo=True, input_names=["input"], **options)
    assert exported is not None
    proto = exported.model_proto
    # Where torch does not know how to convert, it logs that, and leaves the version that it began with.
    written = next(entry.version for entry in proto.opset_import if not entry.domain)
    if written != opset:
        raise ValueError(f"opset {opset} cannot be written, only {written}: give an older one")
    return proto


def _require(*packages: str) -> None:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ImportError(f"export to ONNX needs {' and '.join(missing)}: install dcnet with its extra, dcnet[onnx]")


def _serialize(proto: Any) -> bytes:
    size = proto.ByteSize()
    if size > LARGEST_FILE:
        raise ValueError(f"the model takes {size} bytes, but an ONNX file of one piece holds at most {LARGEST_FILE}")
    content: bytes = proto.SerializeToString()
    return content


@torch.no_grad()
def _compare(model: nn.Module, content: bytes, batches: Sequence[Tensor]) -> None:
    """Refuses a file that onnxruntime cannot run, or with which it gives other results than torch."""
    for batch in batches:
        with _in_evaluation(model):
            # What is None, as the second output of some networks in evaluation, has no place in the file.
            expected = [value.double().cpu() for value in tree_leaves(model(batch)) if value is not None]
        for i, (ours, theirs) in enumerate(zip(expected, _run(content, batch), strict=True)):
            difference = float((ours - theirs).abs().max()) if ours.numel() else 0.0
            limit = TOLERANCE.get(batch.dtype, 1e-4) * float(ours.abs().max()) if ours.numel() else 0.0
            if not difference <= limit:
                raise ArithmeticError(
                    f"output {i} of the ONNX model differs from torch's by up to {difference:.3g} for a batch of "
                    f"{len(batch)}, more than the {limit:.3g} that rounding explains, so nothing was written"
                )


def _run(content: bytes, batch: Tensor) -> list[Tensor]:
    onnxruntime = importlib.import_module("onnxruntime")
    try:
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
        outputs = session.run(None, {session.get_inputs()[0].name: batch.cpu().numpy()})
    except Exception as error:
        raise RuntimeError(
            f"onnxruntime cannot run the model, which check=False would write anyway: {error}"
        ) from error
    return [torch.as_tensor(output).double() for output in outputs]


@contextmanager
def _in_evaluation(model: nn.Module) -> Iterator[None]:
    """Sets the model to evaluation, and every module of it back to what it was."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
