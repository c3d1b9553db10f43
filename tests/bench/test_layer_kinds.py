"""The benchmark of layers of every kind: twins, compiled bases, unsupported operators, memory and time limit."""

import functools
import json
from pathlib import Path

import pytest
import torch
from helpers.tiny_bench import bench

import dcnet
from dcnet.bench import benchmark, correctness, layer_costs
from dcnet.bench.benchmark import Deadline, Group, Steps
from dcnet.bench.layer_costs import LayerBenchmark, LayerConfig, base_of, make_inputs, make_layer
from dcnet.bench.meter import Cpu
from dcnet.bench.shapes import parse_shape

SHAPES = ["M12x6-8", "N2xC4x6xG4", "N2xC4x6xK1", "N2xC4xL8", "N1xC4xD3x4", "B2xH2xT6xD8"]


def config(**changed: object) -> LayerConfig:
    given = {"device": "cpu", "operators": ["sphere-cos"], "threads": 1, "repeats": 2, "warmup": 0}
    given |= {"shapes": ["M12x6-8"], "variants": ["eager"], "dtype": "float32"}
    return LayerConfig(**{**given, **changed})  # type: ignore[arg-type]


def test_every_kind_is_timed_against_its_twin(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "record.json"
    operators = ("--operators", "tanh(radius=2.0)-cos", "linear-cos+linear")
    plot = ("--plot", str(tmp_path / "speed.png"))
    assert bench("layers", "--shapes", *SHAPES, *operators, "--json", str(file), *plot) == 0
    rows = json.loads(file.read_text())["results"]
    assert len(rows) == len(SHAPES) * 2 * 3
    assert all(row["training"]["ratio"] > 0 and row["wrong"] is row["failed"] is None for row in rows)
    attention = next(row for row in rows if row["shape"].startswith("B") and row["variant"] == "eager")
    assert list(attention["errors"])[:4] == ["output", *(f"gradient of {name}" for name in ("query", "key", "value"))]
    shown = capsys.readouterr().out
    for name in ("nn.Linear", "nn.Conv1d", "nn.Conv2d", "nn.Conv3d", "x plain layer, geometric mean"):
        assert name in shown


@pytest.mark.parametrize("text", ["M64x48-32", "N4xC16x8xG16", "N4xC16x8xK1", "N4xC8xL16", "B2xH2xT33xD16"])
def test_half_precision_passes_the_check(text: str):
    operator = "sphere-cos" if text.startswith("B") else "tanh-cos"
    ((conv, eager),) = LayerBenchmark(config(shapes=[text], operators=[operator], dtype="bfloat16"), Cpu()).measure(
        Steps()
    )
    assert (conv["wrong"], eager["wrong"]) == (None, None)
    assert eager["errors"]["output"] > 1e-4


@pytest.mark.parametrize(
    ("text", "kind"), [("M12x6-8", dcnet.DecoupledLinear), ("B2xH2xT6xD8", dcnet.DecoupledAttention)]
)
def test_a_wrong_layer_of_another_kind_is_not_timed(text: str, kind: type, monkeypatch: pytest.MonkeyPatch):
    right = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, *inputs: right(self, *inputs) * 1.001)
    ((conv, eager),) = LayerBenchmark(config(shapes=[text]), Cpu()).measure(Steps())
    assert conv["training"]["ratio"] == 1
    assert eager["wrong"].endswith("(tolerance 1e-04)")
    assert "training" not in eager


def test_unsupported_operators_are_reported_and_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "record.json"
    options = ("--shapes", "B2xH2xT6xD8", "--operators", "tanh-cos", "sphere-cos", "--variants", "eager")
    assert bench("layers", *options, "--json", str(file)) == 0
    record = json.loads(file.read_text())
    assert [bool(row.get("skipped")) for row in record["results"]] == [True, True, False, False]
    assert record["means"][1]["training"] == {}
    assert record["means"][3]["training"]["ratio"] > 0
    error = capsys.readouterr().err
    assert error.startswith("dcnet bench layers: tanh-cos at B2xH2xT6xD8 is not supported: 'tanh-cos' has a radius")
    assert error.count("\n") == 1


def test_step_count_leaves_out_unsupported_operators():
    class Counted(Steps):
        count = 0

        def advance(self) -> None:
            self.count += 1

    options = {"shapes": ["B2xH2xT6xD8", "M3x4-5"], "operators": ["tanh-cos", "sphere-cos"]}
    made, steps = LayerBenchmark(config(**options), Cpu()), Counted()
    list(made.measure(steps))
    assert steps.count == made.step_count > 0


def test_compiled_variants_are_compared_with_the_compiled_plain_layer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    names = ["conv", "conv-compiled", "eager", "compiled", "naive-compiled"]
    ((*rows,),) = LayerBenchmark(config(variants=names[2:]), Cpu()).measure(Steps())
    assert [row["variant"] for row in rows] == names
    ms = {row["variant"]: row["training"]["ms"] for row in rows}
    for row in rows:
        base = "conv-compiled" if row["variant"].endswith("compiled") else "conv"
        assert row["training"]["ratio"] == pytest.approx(ms[row["variant"]] / ms[base])
        assert base_of(row["variant"]) == base


def test_a_failed_compiled_plain_layer_spoils_compiled_variants_only(monkeypatch: pytest.MonkeyPatch):
    right = layer_costs.make_case

    def make_case(variant: str, *args: object):
        if variant == "conv-compiled":
            raise RuntimeError("no compiler")
        return right(variant.removesuffix("compiled") or "eager", *args)  # type: ignore[arg-type]

    monkeypatch.setattr(layer_costs, "make_case", make_case)
    ((conv, failed, eager, compiled),) = LayerBenchmark(config(variants=["eager", "compiled"]), Cpu()).measure(Steps())
    assert conv["training"]["ratio"] == 1
    assert failed["failed"] == "RuntimeError: no compiler"
    assert eager["training"]["ratio"] > 0
    assert compiled["failed"] == "conv-compiled, the base of its ratios, was not timed"


def test_expected_results_are_freed_before_the_memory_is_measured(monkeypatch: pytest.MonkeyPatch):
    made: list[dict] = []
    right = LayerBenchmark._checked

    def checked(self, shape, inputs, references, row):
        made.append(references)
        return right(self, shape, inputs, references, row)

    sizes: list[int] = []
    monkeypatch.setattr(LayerBenchmark, "_checked", checked)
    monkeypatch.setattr(layer_costs, "time_cases", lambda *args: sizes.append(len(made[0])))
    list(LayerBenchmark(config(), Cpu()).measure(Steps()))
    assert sizes == [0]
    assert len(made) == 2


def test_an_error_outside_of_a_layer_marks_its_rows_and_keeps_the_others(monkeypatch: pytest.MonkeyPatch):
    right = layer_costs.make_inputs

    def fail(shape, device, dtype):
        if str(shape) == "M3x4-5":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return right(shape, device, dtype)

    monkeypatch.setattr(layer_costs, "make_inputs", fail)
    first, second = LayerBenchmark(config(shapes=["M3x4-5", "M12x6-8"]), Cpu()).measure(Steps())
    assert [row["failed"] for row in first] == ["OutOfMemoryError: CUDA out of memory"] * 2
    assert all(row["training"]["ratio"] > 0 for row in second)


def test_nothing_is_started_after_the_time_limit(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(benchmark.time, "monotonic", lambda: now[0])
    measured = LayerBenchmark(config(shapes=["M3x4-5", "M12x6-8"], minutes=2.0), Cpu()).measure(Steps())
    assert "training" in next(measured)[1]
    now[0] = 121.0
    late = next(measured)
    sentence = "sphere-cos at M12x6-8 was not timed: the limit of 2 minutes had passed"
    assert [row["skipped"] for row in late] == [sentence] * 2
    assert Deadline(None).passed == ""


def test_progress_is_printed_without_a_terminal(capsys: pytest.CaptureFixture[str]):
    assert bench("layers", "--shapes", "M3x4-5", "M12x6-8") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("tanh-cos at M3x4-5: 50% done after ")
    assert " s left" in lines[0]
    assert lines[1].startswith("tanh-cos at M12x6-8: 100% done after ")


def test_inputs_differ_and_have_the_layout_of_their_kind():
    inputs, gradient = make_inputs(parse_shape("B2xH2xT6xD8"), "cpu", torch.float32)
    assert not torch.equal(inputs["query"], inputs["key"])
    assert not torch.equal(inputs["key"], inputs["value"])
    assert all(tensor.is_contiguous() for tensor in (*inputs.values(), gradient))
    images, _ = make_inputs(parse_shape("N2xC4x6"), "cpu", torch.float32)
    assert images["x"].is_contiguous(memory_format=torch.channels_last)


def test_gradients_of_the_check_have_the_layout_of_the_input():
    for text in ("N2xC4x6", "B2xH2xT6xD8"):
        shape = parse_shape(text)
        inputs, _ = make_inputs(shape, "cpu", torch.float32)
        reference = correctness.make_reference(make_layer("sphere-cos", shape, torch.float32, "cpu"), inputs)
        assert reference.gradients.random.stride() == next(iter(inputs.values())).stride()


def test_every_row_of_a_group_may_have_its_own_base():
    rows: dict[str, dict] = {name: {"variant": name} for name in ("a", "b", "c")}
    group = Group(LayerBenchmark(config(), Cpu()), {"a": "a", "b": "b", "c": "b"}, rows, Steps(), "")
    rows["b"]["failed"] = "broken"
    assert list(group.valid(dict.fromkeys(rows, list))) == ["a"]
    assert rows["c"]["failed"] == "b, the base of its ratios, was not timed"
