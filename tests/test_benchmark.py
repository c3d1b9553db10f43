"""The benchmarks time what is right, and refuse what is wrong."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import dcnet

FOLDER = Path(__file__).parents[1] / "benchmarks"
TINY = ["--batch", "2", "--channels", "4", "--size", "6", "--repeats", "3", "--warmup", "1"]
TINY_NETWORK = ["--networks", "cnn9-small", "--width", "0.1", "--batch", "2", "--size", "8", "--repeats", "3"]


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, which finds beside it what it shares with others, as it does when it is run."""
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("cpu_layer", monkeypatch)


@pytest.fixture
def inference(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("inference", monkeypatch)


def run(benchmark: ModuleType, *arguments: str) -> int:
    return benchmark.main([*TINY, "--threads", str(torch.get_num_threads()), *arguments])


def test_a_tiny_benchmark_writes_ratios(benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "new" / "results.json"
    assert run(benchmark, "--json", str(file)) == 0
    written = json.loads(file.read_text())
    assert (
        list(written["results"])
        == ["conv", *benchmark.OPERATORS.split(",")]
        == ["conv", *written["config"]["operators"]]
    )
    assert written["results"]["conv"]["ratio"] == 1
    assert all(result["ratio"] > 0 for result in written["results"].values())
    assert {"cpu", "cores", "torch", "date"} <= set(written["environment"])
    assert "tanh-cos" in capsys.readouterr().out


def every_operator() -> list[str]:
    magnitudes = [f"{name}-cos" for name in dcnet.magnitude.registry]
    angles = [f"tanh-{name}" for name in dcnet.angle.registry]
    return [*magnitudes, *angles, *(f"tanh-cos+{name}" for name in dcnet.weighting.registry), "tanh&log-cos+product"]


@pytest.mark.parametrize("operator", every_operator())
def test_every_operator_passes_the_check(benchmark: ModuleType, operator: str):
    config = benchmark.Config([operator], batch=2, channels=4, size=6)
    for variant in benchmark.variants(config):
        assert benchmark.error(variant, config) <= benchmark.TOLERANCE


def test_a_wrong_layer_is_not_timed(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    right = dcnet.DecoupledConv2d.forward

    def wrong(self: dcnet.DecoupledConv2d, input: Tensor) -> Tensor:
        return right(self, input) * 1.001

    monkeypatch.setattr(dcnet.DecoupledConv2d, "forward", wrong)
    assert run(benchmark, "--operators", "tanh-cos", "--json", str(tmp_path / "results.json")) == 1
    captured = capsys.readouterr()
    assert captured.err == "tanh-cos is wrong by 1.0e-03 of its largest value, so it is not timed\n"
    assert not captured.out
    assert not list(tmp_path.iterdir())


def test_a_layer_with_a_wrong_gradient_is_not_timed(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch):
    right = dcnet.DecoupledConv2d.forward
    monkeypatch.setattr(dcnet.DecoupledConv2d, "forward", lambda self, x: right(self, x.detach()) + 0 * x)
    assert run(benchmark, "--operators", "tanh-cos") == 1


def test_a_layer_that_gives_nan_is_not_timed(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch):
    right = dcnet.DecoupledConv2d.forward
    monkeypatch.setattr(dcnet.DecoupledConv2d, "forward", lambda self, x: right(self, x) * float("nan"))
    assert run(benchmark, "--operators", "tanh-cos") == 1


def test_every_round_times_every_variant_once(benchmark: ModuleType):
    config = benchmark.Config(["tanh-cos", "linear-cos"], batch=1, channels=2, size=4, repeats=5, warmup=2)
    times = benchmark.time_all(list(benchmark.variants(config)), config)
    assert {name: len(taken) for name, taken in times.items()} == {"conv": 5, "tanh-cos": 5, "linear-cos": 5}


def test_an_even_kernel_is_refused(benchmark: ModuleType, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        run(benchmark, "--kernel", "2")
    assert "must be odd, not 2" in capsys.readouterr().err


def run_inference(inference: ModuleType, *arguments: str) -> int:
    return inference.main([*TINY_NETWORK, "--threads", str(torch.get_num_threads()), *arguments])


def test_a_tiny_inference_benchmark_writes_ratios(
    inference: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "results.json"
    assert run_inference(inference, "--operators", "tanh-cos,linear-cos", "--json", str(file)) == 0
    written = json.loads(file.read_text())
    labels = [f"{name}{ending}" for name in ("conv", "tanh-cos", "linear-cos") for ending in ("", ", folded")]
    assert list(written["results"]["cnn9-small"]) == labels
    assert written["results"]["cnn9-small"]["conv"]["ratio"] == 1
    assert all(result["ratio"] > 0 for result in written["results"]["cnn9-small"].values())
    assert {"cpu", "cores", "torch", "date"} <= set(written["environment"])
    assert "tanh-cos, folded" in capsys.readouterr().out


def test_a_wrong_fold_is_not_timed(
    inference: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    right = inference.fold
    monkeypatch.setattr(inference, "fold", lambda model: torch.nn.Sequential(right(model), torch.nn.Softplus()))
    assert run_inference(inference, "--json", str(tmp_path / "results.json")) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("cnn9-small with conv, folded is wrong by")
    assert not captured.out
    assert not list(tmp_path.iterdir())


def test_an_unknown_network_is_refused(inference: ModuleType, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        run_inference(inference, "--networks", "cnn9,vgg")
    assert "unknown network 'vgg', expected some of cnn9, " in capsys.readouterr().err
