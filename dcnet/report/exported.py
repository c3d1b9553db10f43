"""A network as an ONNX file, and how far it is from torch."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dcnet.export import export_onnx
from dcnet.folding import fold

IMAGES = 16


@torch.no_grad()
def export(
    model: nn.Module, shape: tuple[int, int, int], path: Path, metadata: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """Folds the network, writes it, and compares what onnxruntime makes of the file with the network as it was."""
    images = torch.rand(IMAGES, *shape, generator=torch.Generator().manual_seed(0))
    export_onnx(fold(model), images[:2], path, metadata=metadata)
    expected, found = model(images).double(), _run(path, images).double()
    return {
        "bytes": path.stat().st_size,
        "largest_difference": float((expected - found).abs().max()),
        "largest_logit": float(expected.abs().max()),
    }


def _run(path: Path, images: Tensor) -> Tensor:
    onnxruntime = importlib.import_module("onnxruntime")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    return torch.from_numpy(logits)
