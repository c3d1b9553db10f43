"""Export of networks: a torch.export program, or an ONNX file whose outputs are compared with torch first."""

import importlib
import importlib.util
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dcnet.files import write_atomically
from dcnet.inference.fold_network import check_mean_norms
from dcnet.modes import evaluating

# The oldest version that torch.onnx writes, which every runtime supports.
OPSET = 18
# The largest accepted difference from torch, relative to the largest value: four units in the last place for float16.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3}
# The limit of a protocol buffer.
LARGEST_FILE = 2**31 - 1


def export_program(model: nn.Module, example_input: Tensor, dynamic_batch: bool = True) -> torch.export.ExportedProgram:
    """The model in evaluation mode as a torch.export program, for any batch size or that of the example.

    Args:
        model: takes one tensor; it is not changed.
        example_input: a batch with the shape, dtype and device that the program is for.
        dynamic_batch: whether the first dimension may have any size.
    """
    check_mean_norms(model)
    shape = list(example_input.shape) if isinstance(example_input, Tensor) else []
    if not shape or shape[0] == 0:
        found = f"one of shape {shape}" if isinstance(example_input, Tensor) else f"a {type(example_input).__name__}"
        raise TypeError(f"example_input must be one tensor with a batch of 1 or more, not {found}")
    # torch.export would treat a batch size of 1 as a constant.
    alone = dynamic_batch and len(example_input) == 1
    traced = torch.cat([example_input, example_input]) if alone else example_input
    # The wrapper of torch.compile has no named argument whose first dimension could be dynamic.
    model = getattr(model, "_orig_mod", model)
    with evaluating(model):
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
    """Writes the model in evaluation mode as one ONNX file, after checking that onnxruntime gives the same results.

    Apply `dcnet.fold` first for a smaller and faster file.

    Args:
        model: takes one tensor; it is not changed.
        example_input: a batch with the shape, dtype and device that the model is for.
        path: the file, written atomically.
        dynamic_batch: whether the first dimension may have any size.
        opset: the version of the ONNX operator set.
        check: whether to compare the outputs; with a dynamic batch also for another batch size.
        metadata: further values for the file, by name, such as the names of the classes. A value that is not a string
            is written as JSON; onnxruntime returns them in `session.get_modelmeta().custom_metadata_map`.
    """
    if opset < OPSET:
        raise ValueError(f"opset must be {OPSET} or more, not {opset}")
    if Path(path).is_dir():
        raise ValueError(f"path must be a file, not the folder {str(path)!r}")
    _require("onnx", "onnxscript", *["onnxruntime"] * check)
    described = _as_strings(metadata or {})
    proto = _translate(export_program(model, example_input, dynamic_batch), dynamic_batch, opset)
    for name, text in described.items():
        proto.metadata_props.add(key=name, value=text)
    content = _serialize(proto)
    if check:
        batches = [example_input, torch.cat([example_input, example_input[:1]])] if dynamic_batch else [example_input]
        _compare(model, content, [batch.detach() for batch in batches])
    write_atomically(path, content)


def _as_strings(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Converts the values to strings; raises ValueError for a value that JSON cannot represent."""
    try:
        return {
            str(name): value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)
            for name, value in metadata.items()
        }
    except (TypeError, ValueError) as error:
        raise ValueError(f"metadata must be strings or values for JSON: {error}") from None


def _shapes(dynamic_batch: bool) -> tuple[dict[int, Any]] | None:
    return ({0: torch.export.Dim("batch", min=1)},) if dynamic_batch else None


def _translate(program: torch.export.ExportedProgram, dynamic_batch: bool, opset: int) -> Any:
    """The program as an ONNX protocol buffer, with an input named `input` and a first dimension named `batch`."""
    options: dict[str, Any] = {"dynamic_shapes": _shapes(dynamic_batch), "opset_version": opset, "verbose": False}
    with warnings.catch_warnings():
        # Warnings about the code of torch and onnxscript.
        warnings.simplefilter("ignore", category=DeprecationWarning)
        warnings.simplefilter("ignore", category=FutureWarning)
        exported = torch.onnx.export(program, (), dynamo=True, input_names=["input"], **options)
    assert exported is not None
    proto = exported.model_proto
    # If torch cannot convert to the version, it logs that and keeps its default.
    written = next(entry.version for entry in proto.opset_import if not entry.domain)
    if written != opset:
        raise ValueError(f"opset {opset} is not supported by torch, which wrote {written}: give an older one")
    return proto


def _require(*packages: str) -> None:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ImportError(f"export to ONNX requires {' and '.join(missing)}: install dcnet[onnx]")


def _serialize(proto: Any) -> bytes:
    size = proto.ByteSize()
    if size > LARGEST_FILE:
        raise ValueError(f"the model has {size} bytes, but a single ONNX file holds at most {LARGEST_FILE}")
    content: bytes = proto.SerializeToString()
    return content


@torch.no_grad()
def _compare(model: nn.Module, content: bytes, batches: Sequence[Tensor]) -> None:
    """Raises an error if onnxruntime cannot run the file, or if its results differ from those of torch."""
    for batch in batches:
        with evaluating(model):
            # An output that is None, as some networks have in evaluation mode, is not in the file.
            expected = [value.double().cpu() for value in tree_leaves(model(batch)) if value is not None]
        for i, (ours, theirs) in enumerate(zip(expected, run_onnx(content, batch), strict=True)):
            difference = float((ours - theirs).abs().max()) if ours.numel() else 0.0
            limit = TOLERANCE.get(batch.dtype, 1e-4) * float(ours.abs().max()) if ours.numel() else 0.0
            if not difference <= limit:
                raise ArithmeticError(
                    f"output {i} of the ONNX model differs from torch by up to {difference:.3g} for a batch of "
                    f"{len(batch)}, more than the {limit:.3g} that rounding explains; nothing was written"
                )


def run_onnx(content: bytes, batch: Tensor) -> list[Tensor]:
    """Runs an ONNX model on a batch with onnxruntime. Returns its outputs in float64."""
    onnxruntime = importlib.import_module("onnxruntime")
    try:
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
        outputs = session.run(None, {session.get_inputs()[0].name: batch.cpu().numpy()})
    except Exception as error:
        raise RuntimeError(f"onnxruntime cannot run the model ({error}); check=False writes it anyway") from error
    return [torch.as_tensor(output).double() for output in outputs]
