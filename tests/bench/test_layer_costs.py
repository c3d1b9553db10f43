"""The benchmark of layers: records, clocks, and layers that are wrong or fail."""

import functools
import json
from pathlib import Path

import pytest
import torch
from helpers.tiny_bench import bench
from torch import Tensor

import dcnet
from dcnet.bench.benchmark import Steps
from dcnet.bench.layer_costs import LayerBenchmark, LayerConfig
from dcnet.bench.meter import Call, Clock, Cpu, Stopwatch, kept_mib
from dcnet.environment import commit
from dcnet.report.speed_tables import terminal_tables


class Graphless(Cpu):
    """A meter with the clocks, launches and memory of a GPU; the n-th reading takes n ms."""

    device = "cpu"
    memory_name = "peak_mib"

    def __init__(self) -> None:
        self.read: list[str] = []

    @property
    def clocks(self) -> tuple[Clock, ...]:
        return Clock("", self.started("")), Clock("host_", self.started("host "), most_rounds=2)

    def started(self, kind: str):
        def start(call: Call) -> Stopwatch:
            return lambda: float(self.read.append(kind + variant_of(call)) or len(self.read))

        return start

    def memory_mib(self, forward: Call, training: Call) -> float:
        return {"conv": 2.0, "eager": 3.0}[variant_of(training)]

    def launches(self, call: Call) -> int | None:
        return {"conv": 2, "eager": 5}[variant_of(call)]


def variant_of(call) -> str:
    holder = call.func if call.func.__class__.__name__.endswith("Conv2d") else call.args[0].layer
    return "conv" if type(holder) is torch.nn.Conv2d else "eager"


def config(**changed: object) -> LayerConfig:
    given = {"device": "cpu", "operators": ["tanh-cos"], "threads": 1, "repeats": 3, "warmup": 1}
    given |= {"shapes": ["N2xC4x6"], "variants": ["eager"], "dtype": "float32"}
    return LayerConfig(**{**given, **changed})  # type: ignore[arg-type]


def test_the_record_of_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file, picture = tmp_path / "new" / "record.json", tmp_path / "speed.png"
    shapes = ("--shapes", "N2xC4x6", "N2xC4x8")
    assert bench("layers", *shapes, "--json", str(file), "--plot", str(picture)) == 0
    record = json.loads(file.read_text())
    assert record["benchmark"] == "layers"
    assert record["complete"] is True
    assert record["config"]["shapes"] == ["N2xC4x6", "N2xC4x8"]
    assert {"cpu", "cores", "torch", "date"} <= set(record["environment"])
    assert record["commit"] == commit()
    assert set(record["ceilings"]) == {"bytes_per_s", "flops_per_s"}
    assert record["floors_ms"]["N2xC4x6"]["training"] > record["floors_ms"]["N2xC4x6"]["forward"] > 0
    variants = [(row["shape"], row["variant"]) for row in record["results"]]
    assert variants == [(shape, name) for shape in shapes[1:] for name in ("conv", "eager", "naive")]
    for row in record["results"]:
        assert row["operator"] == "tanh-cos"
        assert row["wrong"] is row["failed"] is None
        assert row["kept_mib"] > 0
        assert set(row["forward"]) == set(row["training"]) == {"ms", "ms_quartiles", "ratio", "ratio_quartiles"}
        assert row["training"]["ms"] > 0
        assert (row["variant"] != "conv") or row["training"]["ratio"] == row["memory_ratio"] == 1
    assert [mean["variant"] for mean in record["means"]] == ["conv", "eager", "naive"]
    assert record["means"][1]["shapes"] == 2
    assert picture.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "N2 C4 6x6, float32, CPU" in out
    assert "geometric mean" in out
    assert "floor" in out
    assert f"wrote {file}" in out


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_layers_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str):
    """Also the compiled naive formulation, which may free its saved tensors after one backward pass."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    variants = ["compiled", "naive-compiled"]
    assert bench("layers", "--variants", *variants, "--json", str(tmp_path / "record.json")) == 0
    record = json.loads((tmp_path / "record.json").read_text())
    assert [row["variant"] for row in record["results"]] == ["conv", "conv-compiled", *variants]
    for row in record["results"][1:]:
        assert row["training"]["ratio"] > 0
        assert max(row["errors"].values()) <= record["tolerance"]


def wrong_forward(monkeypatch: pytest.MonkeyPatch, change) -> None:
    right = dcnet.DecoupledConv2d.forward
    monkeypatch.setattr(dcnet.DecoupledConv2d, "forward", lambda self, x: change(right(self, x), x))


def test_a_wrong_layer_is_reported_and_not_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    wrong_forward(monkeypatch, lambda output, x: output * 1.001)
    assert bench("layers", "--json", str(tmp_path / "record.json")) == 1
    conv, eager, naive = json.loads((tmp_path / "record.json").read_text())["results"]
    assert eager["wrong"].endswith("(tolerance 1e-04)")
    assert eager["errors"]["output"] == pytest.approx(1e-3, rel=0.01)
    assert "training" not in eager
    assert conv["training"]["ratio"] == 1
    assert naive["training"]["ratio"] > 0
    captured = capsys.readouterr()
    assert captured.err.startswith("dcnet bench layers: N2xC4x6, tanh-cos, eager is wrong and was not timed: ")
    assert captured.err.count("\n") == 1
    assert "wrong" in captured.out


@pytest.mark.parametrize(
    "change",
    [
        lambda output, x: output.detach() + 0 * x.sum() + 0 * output,
        lambda output, x: output * float("nan"),
    ],
    ids=["wrong gradients", "nan"],
)
def test_wrong_gradients_and_nan_are_not_timed(monkeypatch: pytest.MonkeyPatch, change, tmp_path: Path):
    wrong_forward(monkeypatch, change)
    assert bench("layers", "--json", str(tmp_path / "record.json")) == 1
    assert "training" not in json.loads((tmp_path / "record.json").read_text())["results"][1]


def test_other_layers_are_timed_after_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def fail(output: Tensor, x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    wrong_forward(monkeypatch, fail)
    assert bench("layers", "--json", str(tmp_path / "record.json")) == 1
    _, eager, naive = json.loads((tmp_path / "record.json").read_text())["results"]
    assert eager["failed"] == "OutOfMemoryError: CUDA out of memory."
    assert naive["training"]["ratio"] > 0
    assert "eager failed and was not timed: OutOfMemoryError" in capsys.readouterr().err


def test_without_the_plain_layer_nothing_is_timed(monkeypatch: pytest.MonkeyPatch):
    def fail(self: torch.nn.Conv2d, x: Tensor) -> Tensor:
        raise RuntimeError("no engine")

    monkeypatch.setattr(torch.nn.Conv2d, "forward", fail)
    ((conv, eager),) = LayerBenchmark(config(), Graphless()).measure(Steps())
    assert conv["failed"] == "RuntimeError: no engine"
    assert eager["failed"] == "conv, the base of its ratios, was not timed"


def test_the_record_has_all_clocks_launches_and_memory():
    meter = Graphless()
    ((conv, eager),) = LayerBenchmark(config(), meter).measure(Steps())
    # Three rounds with the host clock, one of them a warmup, and four with the main clock; for both passes.
    turns = ["conv", "eager", "eager", "conv"]
    rounds = [f"host {name}" for name in (*turns, *turns[:2])] + turns * 2
    assert meter.read == rounds * 2
    assert eager["training"]["launches"] == 5
    assert eager["training"]["launches_ratio"] == 2.5
    assert eager["peak_mib"] == 3
    assert eager["memory_ratio"] == 1.5
    assert {"ms", "host_ms", "host_ratio"} <= set(eager["forward"])
    assert conv["forward"]["host_ratio"] == 1


def test_means_are_geometric_and_none_if_a_ratio_is_missing():
    benchmark = LayerBenchmark(config(), Graphless())
    row = {"operator": "tanh-cos", "variant": "eager", "forward": {"ratio": 1.5}, "memory_ratio": 2.0}
    rows = [{**row, "training": {"ratio": 1.0, "host_ratio": 2.0}}, {**row, "training": {"ratio": 4.0}}]
    (mean,) = benchmark.summary(rows)["means"]
    assert mean["training"]["ratio"] == pytest.approx(2)
    assert mean["training"]["host_ratio"] is None
    assert mean["forward"]["ratio"] == pytest.approx(1.5)
    assert mean["memory_ratio"] == pytest.approx(2)


def test_check_batch_limits_the_checked_images(monkeypatch: pytest.MonkeyPatch):
    seen: list[int] = []
    wrong_forward(monkeypatch, lambda output, x: seen.append(len(x)) or output)
    list(LayerBenchmark(config(check_batch=1), Cpu()).measure(Steps()))
    checks = seen.index(2)
    assert set(seen[:checks]) == {1}
    assert set(seen[checks:]) == {2}


def test_step_count_equals_the_number_of_steps():
    class Counted(Steps):
        count = 0

        def advance(self) -> None:
            self.count += 1

    benchmark, steps = LayerBenchmark(config(variants=["eager", "naive"]), Cpu()), Counted()
    list(benchmark.measure(steps))
    assert steps.count == benchmark.step_count > 0


def test_kept_mib_counts_every_storage_once():
    x = torch.randn(1024, 1024, requires_grad=True)
    assert kept_mib(lambda: x * x) == 4
    assert kept_mib(lambda: x * x.exp()) == 8


def test_the_table_of_a_gpu_record():
    benchmark = LayerBenchmark(config(), Graphless())
    rows = [row for group in benchmark.measure(Steps()) for row in group]
    record = {"benchmark": "layers", "config": {**benchmark.described(), "device": "cuda"}, "environment": {"gpu": "X"}}
    record |= {"results": rows, "floors_ms": {"N2xC4x6": {"forward": 0.5, "training": 1.5}}}
    (table,) = terminal_tables(record)
    assert table.headings[-2:] == ["launches", "peak, MiB"]
