"""The benchmark of heads: records, heads that do not fit into memory, failures and wrong losses."""

import gc
import json
import math
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.tiny_bench import bench

from dcnet.bench import head_costs, head_steps, meter
from dcnet.bench.head_steps import HEADS, GroupOfOne, Size, make_step
from dcnet.bench.meter import Cpu
from dcnet.bench.shapes import Ceilings
from dcnet.cli.app import main
from dcnet.losses import MarginSoftmax

ALL = [(8, classes, head) for classes in (50, 500) for head in HEADS]


@pytest.fixture(autouse=True, scope="module")
def quick_collections():
    """Excludes the objects of torch from garbage collection, which runs before every step."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def known_ceilings(monkeypatch: pytest.MonkeyPatch):
    """Replaces the measurement of peak speeds, which is slow and tested elsewhere."""
    monkeypatch.setattr(Cpu, "ceilings", lambda *_: Ceilings(1e10, 1e11))


def run(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    file = tmp_path / "record.json"
    assert bench("heads", *arguments, "--json", str(file)) == 0
    return json.loads(file.read_text())


def step_of(head: str, sample: float = 0.5, **sizes: int) -> head_steps.HeadStep:
    size = Size(**{"classes": 40, "batch": 6, "features": 8, "itemsize": 4, **sizes})
    return make_step(head, size, "arcface", sample, torch.float32, "cpu")


def test_time_and_memory_of_heads_by_number_of_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    record = run(tmp_path, "--plot", str(tmp_path / "heads.svg"))
    rows = record["results"]
    assert [(row["batch"], row["classes"], row["head"]) for row in rows] == ALL
    assert record["complete"] is True
    assert record["config"]["margin"] == "arcface"
    assert "operators" not in record["config"]
    assert "estimates" not in record
    for row in rows:
        assert (row["wrong"], row["failed"], row["skipped"]) == (None, None, None)
        assert row["errors"]["loss"] < 1e-4
        assert row["training"]["ms"] > 0
        assert row["training"]["ratio"] == 1 or row["head"] != "linear"
        assert row["floor_ms"] > 0
    assert (tmp_path / "heads.svg").read_bytes().startswith(b"<?xml")
    captured = capsys.readouterr()
    assert "training step of a head, arcface, batch 8, 16 features" in captured.out
    assert captured.err == ""
    assert not dist.is_initialized()


def test_bfloat16_and_a_choice_of_heads(tmp_path: Path):
    chosen = ("--heads", "margin", "sampled", "--dtype", "bfloat16", "--margin", "sphereface2", "--sample", "0.5")
    rows = run(tmp_path, *chosen)["results"]
    assert [row["head"] for row in rows] == ["margin", "sampled"] * 2
    # Without the linear head there is no base for ratios.
    assert all(row["training"]["ratio"] is None and row["errors"]["loss"] > 0 for row in rows)


def test_a_head_that_does_not_fit_into_memory_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    many = ("--classes", "50", "9000000000000", "--heads", "margin", "--plot", str(tmp_path / "heads.png"))
    first, second = run(tmp_path, *many)["results"]
    assert first["skipped"] is None
    assert "training" not in second
    error = capsys.readouterr().err
    start = "margin with 9,000,000,000,000 classes and a batch of 8 is skipped: it needs about 1609325.4 GiB of "
    assert second["skipped"].startswith(start)
    assert second["skipped"].endswith(" GiB")
    assert error == f"dcnet bench heads: {second['skipped']}\n"


def test_a_head_that_runs_out_of_memory_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    right = head_costs.make_step

    def make(head: str, size: Size, *rest: Any) -> head_steps.HeadStep:
        if head == "margin" and size.classes == 500:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return right(head, size, *rest)

    monkeypatch.setattr(head_costs, "make_step", make)
    rows = run(tmp_path)["results"]
    assert [row["head"] for row in rows if row["skipped"]] == ["margin"]
    assert sum("training" in row for row in rows) == 7
    assert "margin with 500 classes and a batch of 8 is skipped: it ran out of memory" in capsys.readouterr().err


def test_other_errors_fail_the_benchmark(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    right = head_costs.loss_error

    def error(step: head_steps.HeadStep) -> float:
        if isinstance(step.head, torch.nn.Linear):
            raise RuntimeError("no such thing\nand more")
        return right(step)

    monkeypatch.setattr(head_costs, "loss_error", error)
    assert bench("heads", "--classes", "50") == 1
    expected = "linear, 50, 8 failed and was not timed: RuntimeError: no such thing\n"
    assert capsys.readouterr().err == f"dcnet bench heads: {expected}"


def test_a_wrong_loss_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(head_costs, "loss_error", lambda step: 0.5)
    assert bench("heads", "--classes", "50", "--json", str(tmp_path / "r.json")) == 1
    rows = json.loads((tmp_path / "r.json").read_text())["results"]
    assert all(row["wrong"].startswith("loss is off by 5.0e-01") and "training" not in row for row in rows)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--classes", "1"], "--classes must be 2 or more, not 1"),
        (["--batch", "0"], "--batch must be 1 or more, not 0"),
        (["--features", "0"], "--features must be 1 or more, not 0"),
        (["--sample", "0"], "--sample must be a share above 0 and at most 1, not 0.0"),
        (["--sample", "nan"], "--sample must be a share above 0 and at most 1, not nan"),
        (["--gpus", "0"], "--gpus must be 1 or more, not 0"),
        (["--link", "0"], "--link must be a number above 0, not 0.0"),
        (["--seconds", "-1"], "--seconds must be a number above 0, not -1.0"),
        (["--margin", "arcfice"], "unknown margin 'arcfice'"),
        (["--margin", "arcface(m=9)"], "m of arcface must be in [0, 1.5708), not 9"),
    ],
)
def test_invalid_options_are_rejected_in_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
):
    assert bench("heads", *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"dcnet: {sentence}")


def test_help_explains_every_option(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["bench", "heads", "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for option in ("device", "classes", "batch", "features", "heads", "margin", "sample", "dtype", "seconds", "gpus"):
        assert f"--{option} " in text
    assert "None" not in text
    assert "the exit code is 1" in text


@pytest.mark.parametrize("head", HEADS)
def test_a_step_updates_weights_and_computes_feature_gradients(head: str):
    with GroupOfOne("cpu"):
        step = step_of(head)
        before = step.head.weight.detach().clone()  # type: ignore[operator]
        step()
        assert step.features.grad is not None
    moved = (step.head.weight != before).any(1)  # type: ignore[union-attr]
    assert moved[step.labels].all()
    assert head != "sampled" or moved.sum() <= 20


def test_a_share_with_all_classes_has_the_loss_of_margin_softmax():
    with GroupOfOne("cpu"):
        share = step_of("sharded")
        whole = MarginSoftmax(8, 40, "arcface")
        whole.weight.data.copy_(share.head.weight)  # type: ignore[arg-type]
        torch.testing.assert_close(share.loss(), whole(share.features, share.labels))


def test_floors_by_hand():
    size = Size(classes=1000, batch=10, features=100, itemsize=4)
    weights, logits, flops = 400_000, 40_000, 2_000_000
    assert (size.weight_bytes, size.logit_bytes) == (weights, logits)
    assert size.floor_bytes() == 2 * weights + logits
    assert size.floor_bytes(0.1) == weights + (weights + logits) // 10
    by_bytes = size.floor_ms(Ceilings(bytes_per_s=1e6, flops_per_s=math.inf))
    assert by_bytes == pytest.approx((6 * weights + 2 * logits) / 1000)
    assert size.floor_ms(Ceilings(math.inf, 1e6)) == pytest.approx(3 * flops / 1000)
    assert size.floor_ms(Ceilings(1e6, math.inf), 0.1) == pytest.approx(by_bytes / 10)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(("classes", "features", "batch"), [(20_000, 256, 96), (40_000, 48, 128)])
def test_needed_bytes_match_the_allocated_memory(head: str, classes: int, features: int, batch: int):
    size = Size(classes=classes, batch=batch, features=features, itemsize=4)

    def two_steps() -> None:
        step = make_step(head, size, "arcface", 0.5, torch.float32, "cpu")
        step()
        step()

    with GroupOfOne("cpu"):
        assert most_allocated(two_steps) == pytest.approx(size.needed_bytes(head, 0.5), rel=0.05)


def most_allocated(call: Callable[[], None]) -> int:
    """The peak as torch counts it; the memory of the process also depends on its allocator and libraries."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    assert profile.profiler is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events))


@pytest.mark.skipif(not meter.REFERENCES.exists(), reason="the system does not report it")
def test_peak_bytes_include_temporary_memory():
    cpu = Cpu()
    cpu.free()
    before = cpu.held_bytes()
    assert before is not None
    highest = cpu.peak_bytes(lambda: torch.ones(2**26).sum())
    assert highest is not None
    assert highest - before == pytest.approx(2**28, rel=0.1)


def test_a_system_that_does_not_report_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in ("STATUS", "INFO", "REFERENCES"):
        monkeypatch.setattr(meter, name, tmp_path / "nowhere" / name)
    assert Cpu().free_bytes() == math.inf
    rows = run(tmp_path, "--classes", "50", "500", "--heads", "margin", "--plot", str(tmp_path / "x.png"))["results"]
    assert [row["peak_mib"] for row in rows] == [None, None]
    assert all(row["training"]["ms"] > 0 for row in rows)


def test_out_of_memory_errors_are_recognized():
    message = "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to allocate"
    assert meter.out_of_memory(RuntimeError(message))
    assert meter.out_of_memory(MemoryError())
    assert meter.out_of_memory(torch.OutOfMemoryError())
    assert not meter.out_of_memory(RuntimeError("shapes differ"))
