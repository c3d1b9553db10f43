"""Training steps of whole networks of timm, and several networks in one record."""

import functools
import json
from pathlib import Path

import pytest
import torch
from helpers.packages import timm_or_skip
from helpers.tiny_bench import bench
from torch import nn

from dcnet.bench import network_costs
from dcnet.bench.benchmark import Steps
from dcnet.bench.meter import Cpu
from dcnet.bench.network_costs import NetworkBenchmark, NetworkConfig
from dcnet.bench.timed_networks import TIMM, build_network, drop_nothing_, expand_networks
from dcnet.cli.app import main
from dcnet.layers import Decoupled

timm_or_skip()

# Networks that timm has for tests; the transformer has linear layers, the other one depthwise convolutions.
VIT, CONVNEXT = "timm:test_vit", "timm:test_convnext"


def config(**changed: object) -> NetworkConfig:
    given = {"device": "cpu", "operators": ["sphere-cos"], "threads": 1, "repeats": 2, "warmup": 0}
    given |= {"models": [CONVNEXT], "width": 1.0, "size": 32, "batches": [4], "modes": ["eager"]}
    return NetworkConfig(**{"precision": "float32", "check_batch": 2, **given, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [VIT, CONVNEXT, "timm:test_efficientnet"])
def test_all_layers_but_the_classifier_are_decoupled(name: str):
    model = build_network(name, "tanh-cos", 1.0, 64, fused=False)
    layers = {key: module for key, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)}
    plain = [key for key, module in layers.items() if not isinstance(module, Decoupled)]
    assert plain == ["classifier"]
    assert len(layers) > 5
    twin = build_network(name, "conv", 1.0, 64, fused=False)
    assert not any(isinstance(module, Decoupled) for module in twin.modules())
    assert [key for key, module in twin.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)] == list(layers)


def test_nothing_is_dropped():
    class Path(nn.Module):
        drop_prob = 0.3

    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout2d(0.5), Path())
    drop_nothing_(model)
    assert (model[0].p, model[1].p, model[2].drop_prob) == (0, 0, 0)


def test_several_networks_are_in_one_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "record.json"
    options = ["--model", VIT, CONVNEXT, "--width", "1", "--size", "160", "--batch", "3", "--check-batch", "2"]
    assert bench("network", *options, "--json", str(file), "--plot", str(tmp_path / "speed.png")) == 0
    record = json.loads(file.read_text())
    assert record["config"]["models"] == [VIT, CONVNEXT]
    rows = record["results"]
    assert [(row["model"], row["operator"]) for row in rows] == [
        (model, operator) for model in (VIT, CONVNEXT) for operator in ("conv", "tanh-cos")
    ]
    assert all(row["training"]["ms"] > 0 and row["errors"]["loss"] < 1e-4 for row in rows)
    assert [found["model"] for found in record["fastest"]] == [VIT, CONVNEXT]
    shown = capsys.readouterr().out
    assert "Training step, width 1, 160x160 pixels, float32" in shown
    assert f"{CONVNEXT}, batch 3, eager: 100% done after" in shown


def test_few_images_are_checked_and_a_compiled_network_is_compared_with_the_eager_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    seen: list[int] = []
    right = network_costs.exact_loss
    monkeypatch.setattr(network_costs, "exact_loss", lambda made: seen.append(len(made.images)) or right(made))
    eager, compiled = NetworkBenchmark(config(modes=["eager", "compile"]), Cpu()).measure(Steps())
    assert seen == [2] * 4
    assert [set(row["errors"]) for row in eager] == [{"loss"}] * 2
    assert [set(row["errors"]) for row in compiled] == [{"loss", "compiled loss"}] * 2
    assert all(row["wrong"] is None and row["training"]["ms"] > 0 for row in (*eager, *compiled))


def test_a_wrong_compiled_network_is_not_timed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        torch, "compile", lambda model, **_: lambda images: 2 * model(images) if decoupled(model) else model(images)
    )
    ((plain, row),) = NetworkBenchmark(config(modes=["compile"]), Cpu()).measure(Steps())
    assert plain["training"]["ratio"] == 1
    assert row["wrong"].startswith("compiled loss is off by")
    assert "training" not in row


def decoupled(model: nn.Module) -> bool:
    return any(isinstance(module, Decoupled) for module in model.modules())


def test_a_network_without_memory_does_not_lose_the_others(monkeypatch: pytest.MonkeyPatch):
    right = network_costs.build_network

    def build(name: str, operator: str, *rest: object) -> nn.Module:
        if name == VIT and operator != "conv":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return right(name, operator, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(network_costs, "build_network", build)
    groups = list(NetworkBenchmark(config(models=[VIT, CONVNEXT], size=160), Cpu()).measure(Steps()))
    assert [row["failed"] for row in groups[0]] == [None, "OutOfMemoryError: CUDA out of memory"]
    assert groups[0][0]["training"]["ratio"] == 1
    assert all(row["training"]["ms"] > 0 for row in groups[1])


def test_a_failure_while_timing_marks_the_group(monkeypatch: pytest.MonkeyPatch):
    def fail(self: NetworkBenchmark, group: object, mode: str) -> None:
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(NetworkBenchmark, "_time", fail)
    ((*rows,),) = NetworkBenchmark(config(), Cpu()).measure(Steps())
    assert [row["failed"] for row in rows] == ["RuntimeError: illegal memory access"] * 2


def test_networks_are_skipped_after_the_time_limit():
    benchmark = NetworkBenchmark(config(minutes=1.0), Cpu())
    benchmark.deadline.started -= 61
    ((*rows,),) = benchmark.measure(Steps())
    sentence = f"{CONVNEXT}, batch 4, eager was not timed: the limit of 1 minutes had passed"
    assert [row["skipped"] for row in rows] == [sentence] * 2


def test_step_count_equals_the_number_of_steps():
    class Counted(Steps):
        count = 0

        def advance(self) -> None:
            self.count += 1

    benchmark, steps = NetworkBenchmark(config(models=[CONVNEXT, "cnn9-small"], width=1.0), Cpu()), Counted()
    list(benchmark.measure(steps))
    assert steps.count == benchmark.step_count > 0


def test_timm_stands_for_five_networks():
    assert expand_networks(["timm", "timm:resnet50", "cnn9"]) == [*TIMM, "cnn9"]
    assert len(TIMM) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "timm:resnet5"], "unknown timm network 'resnet5': did you mean resnet5"),
        (["--model", "timm", "--width", "0.5"], "--width must be 1 for networks of timm, not 0.5"),
    ],
)
def test_wrong_networks_give_a_one_line_error(options: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "network", "--device", "cpu", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"dcnet: {message}")
    assert error.count("\n") == 1


def test_a_missing_timm_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    assert main(["bench", "network", "--device", "cpu", "--model", "timm"]) == 2
    assert capsys.readouterr().err == "dcnet: networks of timm require the timm package: pip install timm\n"


def test_defaults_of_timm_networks(monkeypatch: pytest.MonkeyPatch):
    made: list[NetworkConfig] = []
    monkeypatch.setattr(
        "dcnet.cli.bench.Network.session", lambda self, kind, config: made.append(config) or (lambda: 0)
    )
    for name in ("timm:resnet50", "cnn9"):
        assert main(["bench", "network", "--device", "cpu", "--model", name]) == 0
    timm, own = made
    assert (timm.size, timm.check_batch, timm.plans, timm.width) == (224, 8, "ten", 1)
    assert (own.size, own.check_batch, own.plans, own.width) == (32, None, "all", 0.25)
