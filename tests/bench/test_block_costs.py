"""The benchmark of blocks: records, fused blocks, limits of errors, and blocks that are wrong or fail."""

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import fused_blocks
from helpers.tiny_bench import bench
from torch import Tensor, nn

from dcnet import kernels
from dcnet.bench import block_costs
from dcnet.bench.benchmark import Row, Steps
from dcnet.bench.block_costs import BlockBenchmark, BlockConfig, Limits, make_blocks
from dcnet.bench.meter import Call, Cpu
from dcnet.bench.shapes import Shape

NAMES = ["plain", "plain-compiled", "unfused", "unfused-compiled", "fused"]


@pytest.fixture(autouse=True)
def _fast_compiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


def config(**changed: Any) -> BlockConfig:
    given = {"device": "cpu", "operators": ["tanh-cos"], "threads": 1, "repeats": 2, "warmup": 0}
    given |= {"shapes": ["N2xC4x6"], "blocks": 2, "dtype": "float32"}
    return BlockConfig(**{**given, **changed})


def measured(meter: Cpu | None = None, **changed: Any) -> dict[str, Row]:
    (rows,) = BlockBenchmark(config(**changed), meter or Cpu()).measure(Steps())
    return {row["variant"]: row for row in rows}


def test_the_record_of_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file, picture = tmp_path / "record.json", tmp_path / "speed.png"
    shapes = ["N2xC4x6", "N2xC4x8"]
    assert bench("blocks", "--shapes", *shapes, "--json", str(file), "--plot", str(picture)) == 0
    record = json.loads(file.read_text())
    assert (record["benchmark"], record["complete"], record["config"]["blocks"]) == ("blocks", True, 2)
    rows = record["results"]
    assert [(row["shape"], row["variant"]) for row in rows] == [(shape, name) for shape in shapes for name in NAMES]
    for row in rows:
        assert row["wrong"] is row["failed"] is None
        assert set(row["forward"]) == set(row["training"]) == {"ms", "ms_quartiles", "ratio", "ratio_quartiles"}
        assert row["errors"]["output"] <= record["tolerance"]
        radii = {f"gradient of conv{i}.radius" for i in (1, 2)}
        assert radii & set(row["errors"]) == (set() if row["variant"].startswith("plain") else radii)
        if row["variant"] == "plain-compiled":
            assert row["training"]["ratio"] == row["memory_ratio"] == 1
    assert [(mean["variant"], mean["shapes"]) for mean in record["means"]] == [(name, 2) for name in NAMES]
    assert picture.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "2 blocks, N2 C4 6x6, float32, CPU" in out
    assert "The fused variant ran module by module" in out


def test_ratios_are_to_the_compiled_plain_blocks():
    """The memory of each variant is divided by that of the base, which is not the first row."""

    class Weighing(Cpu):
        count = 1

        def memory_mib(self, forward: Call, training: Call) -> float:
            self.count += 1
            return float(self.count)

    rows = measured(Weighing())
    assert {name: row["kept_mib"] for name, row in rows.items()} == dict(
        zip(["plain-compiled", "plain", "unfused", "unfused-compiled", "fused"], range(2, 7), strict=True)
    )
    base = rows["plain-compiled"]
    for row in rows.values():
        assert row["training"]["ratio"] == row["training"]["ms"] / base["training"]["ms"]
        assert row["memory_ratio"] == row["kept_mib"] / 2


def test_only_the_fused_variant_runs_fused_blocks(monkeypatch: pytest.MonkeyPatch, capsys):
    made = fused_blocks.install(monkeypatch)
    calls: dict[str, int] = {}
    checked = BlockBenchmark._checked

    def counting(self: BlockBenchmark, shape: Shape, check: Any, row: Row) -> Any:
        before = len(made.calls)
        case = checked(self, shape, check, row)
        calls[row["variant"]] = len(made.calls) - before
        return case

    monkeypatch.setattr(BlockBenchmark, "_checked", counting)
    rows = measured()
    # Two forward passes of two blocks.
    assert calls == dict.fromkeys(NAMES, 0) | {"fused": 4}
    assert {call.steps for call in made.calls} == {"conv + batch norm + ReLU"}
    assert rows["fused"]["fused_blocks"] == 2
    assert rows["fused"]["training"]["ratio"] > 0
    assert "fused_blocks" not in rows["unfused"]


def test_nothing_counts_as_fused_without_a_gpu():
    assert measured()["fused"]["fused_blocks"] == 0


class Shrunk(torch.autograd.Function):
    """The identity, whose gradient is too small by half."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 0.5 * gradient


@pytest.mark.parametrize(
    ("change", "what"), [(lambda output: 1.001 * output, "output"), (Shrunk.apply, "gradient of ")]
)
def test_wrong_fused_blocks_are_reported_and_not_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, what: str
):
    made = fused_blocks.install(monkeypatch)

    def block(*args: Any) -> tuple[Tensor, Tensor | None, Tensor]:
        output, squares, _ = made.block(*args)
        output = change(output)
        return output, None if squares is None else fused_blocks.sums_of_squares(output), output

    monkeypatch.setattr(kernels, "block", block)
    assert bench("blocks", "--json", str(tmp_path / "record.json")) == 1
    rows = {row["variant"]: row for row in json.loads((tmp_path / "record.json").read_text())["results"]}
    assert rows["fused"]["wrong"].startswith(what)
    assert "training" not in rows["fused"]
    assert all(rows[name]["training"]["ratio"] > 0 for name in NAMES if name != "fused")
    assert "N2xC4x6, tanh-cos, fused is wrong and was not timed: " in capsys.readouterr().err


def test_without_a_compiler_nothing_is_timed(monkeypatch: pytest.MonkeyPatch):
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", fail)
    rows = measured()
    assert rows["plain-compiled"]["failed"] == "RuntimeError: no compiler"
    assert rows["fused"]["failed"] == "plain-compiled, the base of its ratios, was not timed"


def test_limits_of_gradients_grow_with_the_square_root():
    limits = Limits.of(Shape.parse("N512xC96x32"), 4, torch.bfloat16)
    assert limits.output == limits.least == 5e-2
    assert limits.gradient == pytest.approx(math.sqrt(4 * 2e-2))
    errors = {"output": 0.01, "gradient of x": 0.2, "gradient of conv1.weight": 0.2, "gradient of conv1.radius": 0.2}
    alone = limits.of_errors(errors, {})
    assert alone == {**dict.fromkeys(errors, limits.gradient), "output": 5e-2}


def test_a_variant_may_have_at_most_half_as_much_error_again_as_its_modules():
    limits = Limits.of(Shape.parse("N512xC96x32"), 4, torch.bfloat16)
    eager = {"output": 0.001, "gradient of x": 0.1, "gradient of conv1.weight": 0.001, "gradient of norm1.bias": 0.25}
    found = limits.of_errors(eager | {"gradient of conv1.radius": 0.01}, {**eager, "gradient of conv1.radius": 0.01})
    assert found["gradient of x"] == pytest.approx(0.15)
    assert found["gradient of conv1.weight"] == limits.least
    assert found["gradient of norm1.bias"] == limits.gradient
    assert found["gradient of conv1.radius"] == limits.gradient
    assert found["output"] == limits.output


def test_few_relus_may_flip_in_small_shapes():
    limits = Limits.of(Shape.parse("N2xC4x6"), 4, torch.float32)
    assert limits.least == limits.gradient == pytest.approx(math.sqrt(10 / (2 * 4 * 6 * 6)))
    assert limits.output == 1e-4


def test_gradients_worse_than_in_eager_mode_are_wrong(monkeypatch: pytest.MonkeyPatch):
    """By more than the factor, though within the limit of all gradients."""
    limits = Limits(output=1e-3, gradient=0.9, least=1e-3)
    monkeypatch.setattr(block_costs.Limits, "of", lambda *args: limits)
    made = fused_blocks.install(monkeypatch)

    def block(*args: Any) -> tuple[Tensor, Tensor | None, Tensor]:
        output, squares, again = made.block(*args)
        return Shrunk.apply(output), squares, again

    monkeypatch.setattr(kernels, "block", block)
    rows = measured()
    assert "(tolerance 1e-03)" in rows["fused"]["wrong"]
    assert rows["unfused"]["wrong"] is None


def test_half_precision_has_norms_in_float32():
    model = make_blocks("tanh-cos", 2, Shape.parse("N8xC8x8"), torch.bfloat16, "cpu")
    for module in model:
        kinds = {value.dtype for value in module.parameters()}
        assert kinds == ({torch.float32} if isinstance(module, nn.BatchNorm2d) else {torch.bfloat16} & kinds)
    assert [type(module) for module in model[:3]] == [type(model.conv1), nn.BatchNorm2d, nn.ReLU]
    rows = measured(dtype="bfloat16", shapes=["N8xC8x8"])
    assert [row["wrong"] for row in rows.values()] == [None] * len(NAMES)
    assert rows["fused"]["errors"]["output"] > 1e-4


def test_all_variants_have_the_same_filters():
    shape = Shape.parse("N2xC4x6")
    plain, decoupled = (make_blocks(name, 2, shape, torch.float32, "cpu") for name in ("conv", "tanh-cos"))
    assert torch.equal(make_blocks("tanh-cos", 2, shape, torch.float32, "cpu").conv2.weight, decoupled.conv2.weight)
    assert type(plain.conv1) is nn.Conv2d
    assert plain.conv1.weight.shape == decoupled.conv1.weight.shape


def test_expected_results_are_freed_before_the_timing(monkeypatch: pytest.MonkeyPatch):
    checks = []
    made = block_costs.Check.__init__

    def init(self: block_costs.Check, *args: Any) -> None:
        made(self, *args)
        checks.append(self)

    monkeypatch.setattr(block_costs.Check, "__init__", init)
    seen = []
    monkeypatch.setattr(block_costs, "time_cases", lambda *args: seen.append(dict(checks[0].references)))
    measured()
    assert seen == [{}]


def test_check_batch_limits_the_checked_images(monkeypatch: pytest.MonkeyPatch):
    seen = []
    right = block_costs.correctness.make_reference
    monkeypatch.setattr(
        block_costs.correctness, "make_reference", lambda layer, x: seen.append(len(x)) or right(layer, x)
    )
    measured(check_batch=2, shapes=["N3xC4x6"])
    assert seen == [2, 2]


def test_step_count_equals_the_number_of_steps():
    class Counted(Steps):
        count = 0

        def advance(self) -> None:
            self.count += 1

    benchmark, steps = BlockBenchmark(config(shapes=["N2xC4x6", "N2xC4x8"]), Cpu()), Counted()
    list(benchmark.measure(steps))
    assert steps.count == benchmark.step_count > 0
