"""Exported networks give the results of torch for every operator and batch size, or are not written."""

import importlib.util
import os
import re
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dcnet
from dcnet import export
from dcnet.export import export_onnx, export_program
from dcnet.inference.fold_network import fold

EXAMPLE = Path(__file__).parents[1] / "examples" / "export_onnx.py"


class Side(nn.Module):
    """Many layers on one input, each with its own input shape: one export for all of them."""

    def __init__(self, layers: Sequence[nn.Module], shapes: Sequence[tuple[int, ...]] | None = None):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.shapes = shapes

    def forward(self, input: Tensor) -> list[Tensor]:
        shapes = self.shapes or [input.shape[1:]] * len(self.layers)
        return [layer(input.reshape(-1, *shape)) for layer, shape in zip(self.layers, shapes, strict=True)]


def seen(model: nn.Module, *shape: int) -> nn.Module:
    """The model after a batch, which sets the running means."""
    model(torch.randn(6, *shape))
    return model


def run(path: Path, batch: Tensor) -> list[Tensor]:
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return [torch.from_numpy(output) for output in session.run(None, {"input": batch.numpy()})]


def assert_same_in_onnxruntime(model: nn.Module, path: Path, *shape: int) -> None:
    example = torch.randn(3, *shape)
    export_onnx(model, example, path)
    model.eval()
    for size in (3, 1, 5):
        batch = 2 * torch.randn(size, *shape)
        torch.testing.assert_close(run(path, batch), list(model(batch)), rtol=1e-5, atol=1e-5)


def every_pair() -> list[str]:
    # Two segments, because each is about ten nodes of the graph, which determine the time.
    angles = ["spline(segments=2)" if angle == "spline" else angle for angle in dcnet.angle.registry]
    return [f"{magnitude}-{angle}" for magnitude in dcnet.magnitude.registry for angle in angles]


def each_once() -> list[str]:
    """Operators that contain each magnitude and each angle."""
    magnitudes, angles = list(dcnet.magnitude.registry), list(dcnet.angle.registry)
    pairs = [
        (magnitudes[i % len(magnitudes)], angles[i % len(angles)]) for i in range(max(len(magnitudes), len(angles)))
    ]
    return [f"{h}-{g}".replace("spline", "spline(segments=2)") for h, g in pairs]


@pytest.mark.parametrize(
    "operators", [each_once(), pytest.param(every_pair(), marks=pytest.mark.slow)], ids=["once", "all"]
)
def test_every_magnitude_and_angle(operators: list[str], tmp_path: Path):
    layers = Side([dcnet.DecoupledLinear(5, 3, operator=operator) for operator in operators])
    assert_same_in_onnxruntime(seen(layers, 5), tmp_path / "layers.onnx", 5)


SPLINE = "ball-spline(segments=2)+product"


def windows() -> list[tuple[tuple[int, ...], nn.Module]]:
    """Layers of every kind, each with the shape into which an input of [4, 6, 6] is reshaped."""
    return [
        ((4, 6, 6), dcnet.DecoupledConv2d(4, 6, 3, padding=1, operator="tanh-sigmoid(learnable=True)+linear")),
        ((4, 6, 6), dcnet.DecoupledConv2d(4, 6, 3, stride=2, padding=1, operator="seg-cos+joint")),
        (
            (4, 6, 6),
            dcnet.DecoupledConv2d(4, 6, 3, stride=3, padding=2, groups=2, operator=SPLINE),
        ),
        ((4, 6, 6), dcnet.DecoupledConv2d(4, 6, 3, dilation=2, padding="same", operator="tanh&log-sqcos+product")),
        ((4, 6, 6), dcnet.DecoupledConv2d(4, 8, (2, 4), padding=(1, 2), groups=4, bias=False, operator="linear-cos")),
        ((4, 6, 6), dcnet.DecoupledConv2d(4, 6, 3, padding=1, padding_mode="reflect", operator="mix-relucos")),
        ((4, 6, 6), dcnet.DecoupledConv2d(4, 6, 1, stride=2, operator="sphere-linear")),
        ((4, 36), dcnet.DecoupledConv1d(4, 6, 5, stride=2, padding=2, operator="tanh-linear")),
        ((4, 36), dcnet.DecoupledConv1d(4, 6, 3, dilation=3, groups=2, operator="log-cos+linear")),
        ((4, 6, 3, 2), dcnet.DecoupledConv3d(4, 6, (3, 2, 1), padding=(1, 0, 0), operator="seg-sqcos+linear")),
        ((36, 4), dcnet.DecoupledLinear(4, 6, operator="tanh-power(p=1.5)+joint")),
    ]


@pytest.mark.parametrize("folded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_kind_of_window_weighting_and_layer(folded: bool, tmp_path: Path):
    shapes, layers = zip(*windows(), strict=True)
    model = seen(Side(layers, shapes), 4, 6, 6)
    assert_same_in_onnxruntime(fold(model) if folded else model, tmp_path / "layers.onnx", 4, 6, 6)


def small(operator: str = "tanh-cos") -> nn.Module:
    conv = dcnet.conv2d(3, 4, 3, padding=1, operator=operator)
    return nn.Sequential(conv, nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(64, 2))


def test_the_model_keeps_its_mode_and_its_state(tmp_path: Path):
    model = seen(small(), 3, 4, 4)
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    export_onnx(model, torch.randn(2, 3, 4, 4), tmp_path / "model.onnx")
    assert [part.training for part in model] == [True, False, True, True, True, True]
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_the_batch_is_dynamic_or_fixed_and_named(tmp_path: Path):
    onnx = pytest.importorskip("onnx")
    for dynamic, example in ((True, 1), (False, 3)):
        model, path = seen(dcnet.DecoupledLinear(3, 2), 3), tmp_path / "model.onnx"
        export_onnx(model, torch.randn(example, 3), path, dynamic_batch=dynamic, opset=20)
        written = onnx.load(path)
        assert [entry.version for entry in written.opset_import if not entry.domain] == [20]
        side = written.graph.input[0].type.tensor_type.shape.dim[0]
        assert (side.dim_param, side.dim_value) == (("batch", 0) if dynamic else ("", 3))


@pytest.mark.parametrize("example", [1, 3])
def test_a_program_takes_any_batch(example: int):
    model = seen(small("ball-sigmoid"), 3, 4, 4)
    program = export_program(model, torch.randn(example, 3, 4, 4))
    assert model.training
    model.eval()
    for size in (1, 2, 5):
        batch = torch.randn(size, 3, 4, 4)
        torch.testing.assert_close(program.module()(batch), model(batch))


def test_a_fixed_program_takes_only_the_batch_size_of_the_example():
    program = export_program(seen(small(), 3, 4, 4), torch.randn(3, 3, 4, 4), dynamic_batch=False)
    with pytest.raises(AssertionError, match=r"Guard failed|Expected input"):
        program.module()(torch.randn(2, 3, 4, 4))


def test_error_for_a_layer_that_has_seen_no_data(tmp_path: Path):
    model = nn.Sequential(dcnet.conv2d(3, 4, 3, operator="sphere-cos"), dcnet.conv2d(4, 4, 3, operator="tanh-cos"))
    for call in (lambda x: export_onnx(model, x, tmp_path / "model.onnx"), lambda x: export_program(model, x)):
        with pytest.raises(ValueError, match="layer '1' with operator 'tanh-cos' has seen no data"):
            call(torch.randn(2, 3, 8, 8))
    assert not list(tmp_path.iterdir())


def test_a_wrong_export_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    right = export.run_onnx
    monkeypatch.setattr(export, "run_onnx", lambda *given: [output + 0.5 for output in right(*given)])
    with pytest.raises(ArithmeticError, match=r"output 0 .* differs from torch by up to 0\.5 for a batch of 2"):
        export_onnx(nn.Linear(3, 2), torch.randn(2, 3), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_a_file_that_onnxruntime_cannot_run_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*given: object, **options: object) -> None:
        raise RuntimeError("NOT_IMPLEMENTED")

    monkeypatch.setitem(sys.modules, "onnxruntime", types.SimpleNamespace(InferenceSession=fail, __spec__=object()))
    with pytest.raises(RuntimeError, match=r"onnxruntime cannot run the model \(.*NOT_IMPLEMENTED"):
        export_onnx(nn.Linear(3, 2), torch.randn(2, 3), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
    export_onnx(nn.Linear(3, 2), torch.randn(2, 3), tmp_path / "model.onnx", check=False)
    assert list(tmp_path.iterdir())


def test_a_missing_package_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.startswith("onnxs") else found(name))
    with pytest.raises(ImportError, match="requires onnxscript: install dcnet"):
        export_onnx(small(), torch.randn(2, 3, 4, 4), tmp_path / "model.onnx")


def test_a_file_that_is_too_large_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(export, "LARGEST_FILE", 100)
    with pytest.raises(ValueError, match=r"has \d+ bytes, but a single ONNX file holds at most 100"):
        export_onnx(nn.Linear(3, 2), torch.randn(2, 3), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path):
    path = tmp_path / "digits.onnx"
    command = [sys.executable, str(EXAMPLE), "--epochs", "1", "--out", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert "agree on 1197 of 1197 test images" in done.stdout
    assert path.exists()


def test_an_invalid_path_is_reported_before_the_export(tmp_path: Path) -> None:
    model = nn.Conv2d(3, 4, 3)
    with pytest.raises(ValueError, match="opset must be 18 or more, not 3"):
        export_onnx(model, torch.randn(1, 3, 4, 4), tmp_path / "model.onnx", opset=3)
    with pytest.raises(ValueError, match=r"path must be a file, not the folder"):
        export_onnx(model, torch.randn(1, 3, 4, 4), tmp_path)


def test_a_version_that_cannot_be_written_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="opset 99 is not supported by torch, which wrote 18: give an older one"):
        export_onnx(nn.Conv2d(3, 4, 3), torch.randn(1, 3, 4, 4), tmp_path / "model.onnx", opset=99)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("example", "found"),
    [
        (torch.randn(0, 3, 4, 4), "one of shape [0, 3, 4, 4]"),
        (torch.tensor(1.0), "one of shape []"),
        ((torch.randn(1, 3, 4, 4),), "a tuple"),
    ],
)
def test_an_example_without_a_batch_is_rejected(example: Any, found: str) -> None:
    with pytest.raises(
        TypeError, match=re.escape(f"example_input must be one tensor with a batch of 1 or more, not {found}")
    ):
        export_program(nn.Conv2d(3, 4, 3), example)


def test_a_compiled_network_is_exported_like_the_original() -> None:
    model, batch = seen(nn.Sequential(dcnet.DecoupledLinear(3, 4)), 3), torch.randn(5, 3)
    program = export_program(torch.compile(model, backend="eager"), batch[:2])
    torch.testing.assert_close(program.module()(batch), model.eval()(batch))


class WithoutAuxiliary(nn.Module):
    """Returns None for an output that exists only in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = dcnet.DecoupledLinear(3, 4, operator="sphere-cos")

    def forward(self, input: Tensor) -> tuple[Tensor, None, Tensor]:
        output = self.layer(input)
        return output, None, 2 * output


def test_outputs_that_are_none_are_left_out(tmp_path: Path) -> None:
    model, path, batch = WithoutAuxiliary(), tmp_path / "model.onnx", torch.randn(3, 3)
    export_onnx(model, batch, path)
    torch.testing.assert_close(run(path, batch), [model(batch)[0], model(batch)[2]])


def test_half_precision_has_its_own_tolerance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fold(seen(nn.Sequential(dcnet.DecoupledConv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), 3, 6, 6)).half()
    example = torch.randn(2, 3, 6, 6).half()
    export_onnx(model, example, tmp_path / "model.onnx")
    run = dcnet.export.run_onnx
    monkeypatch.setattr(dcnet.export, "run_onnx", lambda *given: [output * 1.01 for output in run(*given)])
    with pytest.raises(ArithmeticError, match="differs from torch"):
        export_onnx(model, example, tmp_path / "other.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_metadata_is_read_back_by_onnxruntime(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    given = {"classes": ["Käse", "b"], "note": "as it is", "size": 3}
    export_onnx(seen(nn.Linear(3, 2), 3), torch.randn(2, 3), tmp_path / "m.onnx", metadata=given)
    found = onnxruntime.InferenceSession(tmp_path / "m.onnx").get_modelmeta().custom_metadata_map
    assert {name: found[name] for name in given} == {"classes": '["Käse", "b"]', "note": "as it is", "size": "3"}
    for wrong in (object(), float("nan")):
        with pytest.raises(ValueError, match="metadata must be strings or values for JSON"):
            export_onnx(nn.Linear(3, 2), torch.randn(2, 3), tmp_path / "n.onnx", metadata={"a": wrong})
    assert not (tmp_path / "n.onnx").exists()
