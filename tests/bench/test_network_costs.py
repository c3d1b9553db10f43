"""The benchmarks of whole networks: training steps and inference."""

import functools
import json
from pathlib import Path

import pytest
import torch
from helpers.tiny_bench import bench
from torch import nn

from dcnet.bench import network_costs
from dcnet.bench.benchmark import Steps
from dcnet.bench.meter import Cpu
from dcnet.bench.network_costs import Form, InferenceBenchmark, NetworkBenchmark, NetworkConfig
from dcnet.fuse import PLAN
from dcnet.report.speed_cells import form


def results(file: Path) -> list[dict]:
    return json.loads(file.read_text())["results"]


def test_training_steps_are_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "record.json"
    assert bench("network", "--batch", "2", "4", "--json", str(file), "--plot", str(tmp_path / "speed.svg")) == 0
    rows = results(file)
    assert [(row["batch"], row["operator"]) for row in rows] == [
        (batch, operator) for batch in (2, 4) for operator in ("conv", "tanh-cos")
    ]
    for row in rows:
        assert row["mode"] == "eager"
        assert row["errors"]["loss"] < 1e-4
        assert row["images_per_s"] == pytest.approx(1000 * row["batch"] / row["training"]["ms"])
        assert row["kept_mib"] > 0
    assert rows[0]["training"]["ratio"] == rows[0]["memory_ratio"] == 1
    assert rows[1]["memory_ratio"] > 1
    assert (tmp_path / "speed.svg").read_bytes().startswith(b"<?xml")
    assert "Training step of cnn9-small" in capsys.readouterr().out


def test_a_step_updates_all_parameters():
    given = {
        "device": "cpu",
        "operators": ["tanh-cos"],
        "threads": 1,
        "models": ["cnn9-small"],
        "width": 0.1,
        "size": 8,
    }
    config = NetworkConfig(**given, batches=[2], modes=["eager"], precision="float32")  # type: ignore[arg-type]
    training = NetworkBenchmark(config, Cpu())._build("cnn9-small", "tanh-cos", "eager", 2)
    before = [parameter.detach().clone() for parameter in training.model.parameters()]
    losses = [training.step().item() for _ in range(30)]
    assert losses[-1] < losses[0]
    assert all(not torch.equal(was, now) for was, now in zip(before, training.model.parameters(), strict=True))


def test_the_record_has_the_fastest_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    file = tmp_path / "record.json"
    assert bench("network", "--mode", "eager", "compile", "--json", str(file)) == 0
    ms = {(row["operator"], row["mode"]): row["training"]["ms"] for row in results(file)}
    (found,) = json.loads(file.read_text())["fastest"]
    assert (found["batch"], found["operator"]) == (2, "tanh-cos")
    for name, operator in {"decoupled": "tanh-cos", "plain": "conv"}.items():
        mode = min(("eager", "compile"), key=lambda mode, operator=operator: ms[operator, mode])
        assert found[name] == {"mode": mode, "ms": ms[operator, mode]}
    assert found["ratio"] == found["decoupled"]["ms"] / found["plain"]["ms"]
    expected = {mode: ms["tanh-cos", mode] / ms["conv", "compile"] for mode in ("eager", "compile")}
    assert found["x_plain_compiled"] == expected
    shown = capsys.readouterr().out
    assert "x plain compiled" in shown
    assert "Fastest of both: batch 2: " in shown


@pytest.mark.parametrize("fuse", [True, False])
def test_blocks_are_fused_unless_it_is_turned_off(fuse: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dcnet.models.create._has_gpu", lambda: True)
    given = {
        "device": "cpu",
        "operators": ["tanh-cos"],
        "threads": 1,
        "models": ["cnn9-small"],
        "width": 0.1,
        "size": 8,
    }
    config = NetworkConfig(**given, batches=[2], modes=["eager"], precision="float32", fuse=fuse)  # type: ignore[arg-type]
    model = NetworkBenchmark(config, Cpu())._build("cnn9-small", "tanh-cos", "eager", 2).model
    assert any(PLAN in vars(module) for module in model.modules()) == fuse


def test_the_record_says_whether_blocks_are_fused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "record.json"
    for options, fuse in (([], True), (["--no-fuse"], False)):
        assert bench("network", *options, "--json", str(file)) == 0
        assert json.loads(file.read_text())["config"]["fuse"] is fuse
        assert ("not fused" in capsys.readouterr().out) == (not fuse)


def test_bfloat16_by_autocast_and_pure():
    for precision, kind in {"autocast": torch.float32, "pure": torch.bfloat16}.items():
        given = {"device": "cpu", "operators": ["tanh-cos"], "threads": 1, "models": ["cnn9-small"], "width": 0.1}
        config = NetworkConfig(
            **given,  # type: ignore[arg-type]
            size=8,
            batches=[2],
            modes=["eager"],
            precision=precision,
            repeats=2,
            warmup=0,
        )
        benchmark = NetworkBenchmark(config, Cpu())
        assert {
            parameter.dtype for parameter in benchmark._build("cnn9-small", "conv", "eager", 2).model.parameters()
        } == {kind}
        ((_, row),) = benchmark.measure(Steps())
        assert row["wrong"] is None
        assert row["errors"]["loss"] > 1e-7


def test_a_network_with_a_wrong_loss_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    right = network_costs.exact_loss

    def exact_loss(training: network_costs.Training) -> torch.Tensor:
        decoupled = any(hasattr(module, "operator") for module in training.model.modules())
        return right(training) * (2 if decoupled else 1)

    monkeypatch.setattr(network_costs, "exact_loss", exact_loss)
    assert bench("network", "--json", str(tmp_path / "record.json")) == 1
    conv, decoupled = results(tmp_path / "record.json")
    assert decoupled["wrong"].startswith("loss is off by 5.0e-01")
    assert "training" not in decoupled
    assert conv["training"]["ratio"] == 1
    assert "cnn9-small, eager, 2, tanh-cos is wrong" in capsys.readouterr().err


def test_networks_are_timed_as_trained_and_folded(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "record.json"
    operators = ("--operators", "tanh-cos", "linear-cos")
    assert bench("inference", *operators, "--json", str(file), "--plot", str(tmp_path / "speed.png")) == 0
    rows = results(file)
    names = [(operator, folded) for operator in ("conv", "tanh-cos", "linear-cos") for folded in (False, True)]
    assert [(row["operator"], row["folded"]) for row in rows] == names
    assert rows[1]["forward"]["ratio"] == 1
    assert all(row["forward"]["ratio"] > 0 and row["errors"]["logits"] < 1e-4 for row in rows)
    assert not any(row["compiled"] for row in rows)
    assert "folded" in capsys.readouterr().out


def test_inference_is_compared_with_the_folded_compiled_plain_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    file = tmp_path / "record.json"
    assert bench("inference", "--compile", "--json", str(file)) == 0
    ms = {(row["operator"], form(row)): row["forward"]["ms"] for row in results(file)}
    (found,) = json.loads(file.read_text())["fastest"]
    own = {name: value for (operator, name), value in ms.items() if operator == "tanh-cos"}
    assert found["decoupled"]["ms"] == min(own.values())
    base = ms["conv", "folded, compiled"]
    assert found["x_plain_compiled"] == {name: value / base for name, value in own.items()}
    shown = capsys.readouterr().out
    assert "x plain folded compiled" in shown
    assert "Fastest of both: cnn9-small: " in shown


def test_a_wrong_fold_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    right = network_costs.fold

    def fold(model: nn.Module) -> nn.Module:
        decoupled = any(hasattr(module, "operator") for module in model.modules())
        return nn.Sequential(right(model), nn.Softplus()) if decoupled else right(model)

    monkeypatch.setattr(network_costs, "fold", fold)
    assert bench("inference", "--json", str(tmp_path / "record.json")) == 1
    rows = results(tmp_path / "record.json")
    assert [bool(row["wrong"]) for row in rows] == [False, False, False, True]
    assert "forward" not in rows[3]
    error = capsys.readouterr().err
    assert error.startswith("dcnet bench inference: cnn9-small, tanh-cos, folded is wrong and was not timed: logits")


def test_nothing_is_timed_without_the_folded_plain_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    right = network_costs.fold
    monkeypatch.setattr(network_costs, "fold", lambda model: nn.Sequential(right(model), nn.Softplus()))
    assert bench("inference", "--json", str(tmp_path / "record.json")) == 1
    trained = results(tmp_path / "record.json")[0]
    assert trained["failed"] == "conv, folded, the base of its ratios, was not timed"


def test_compiled_forms_come_last():
    given = {"device": "cpu", "operators": ["tanh-cos"], "threads": 1, "networks": ["cnn9"], "width": 1.0, "batch": 2}
    config = network_costs.InferenceConfig(**given, size=8, dtype="float32", compile=True)  # type: ignore[arg-type]
    forms = [str(made) for made in InferenceBenchmark(config, Cpu()).forms]
    assert forms[:4] == ["conv", "conv, folded", "tanh-cos", "tanh-cos, folded"]
    assert forms[4:] == [f"{name}, compiled" for name in forms[:4]]
    assert str(Form("conv", folded=True, compiled=False)) == "conv, folded"
