"""`dcnet list`: registries and runs as tables and as JSON."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from helpers.cli_runs import answer, call, complaint, root, trained
from torch import Tensor

import dcnet
from dcnet.data import datasets
from dcnet.models import networks
from dcnet.report import listing
from dcnet.training import RECIPES

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def cube() -> Iterator[None]:
    """A magnitude that is registered for one test."""

    @dcnet.magnitude.register
    @dataclass(frozen=True)
    class Cube(dcnet.magnitude.Magnitude):
        """h(n) = n^3."""

        name: ClassVar[str] = "cube"
        equation: ClassVar[str] = "{n}^3"

        def value(self, n: Tensor) -> Tensor:
            return n**3

    yield
    del dcnet.magnitude.registry["cube"]


def test_operators_are_those_of_the_registries(capsys: Capture, cube: None):
    listed = answer(capsys, "list", "operators")
    registries = {kind: getattr(dcnet, kind).registry for kind in ("magnitude", "angle", "weighting")}
    assert {kind: [row["name"] for row in listed[f"{kind}s"]] for kind in registries} == {
        kind: list(registry) for kind, registry in registries.items()
    }
    rows = {row["name"]: row for row in listed["magnitudes"]}
    assert rows["cube"]["equation"] == "h(n) = n^3"
    assert rows["tanh"]["bounded"] is True
    assert rows["seg"]["smooth"] is False
    assert rows["seg"]["constants"]["slope"]["init"] == 0.5
    assert {row["name"]: row["keeps_bound"] for row in listed["weightings"]}["linear"] is False


def test_operators_table_has_equations_and_constants(capsys: Capture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert call("list", "operators") == 0
    text = capsys.readouterr().out
    for part in ("alpha tanh(n / rho)", "rho = 1 x mean ||x|| (learned per channel)", "9 slopes = 1 (learned)"):
        assert part in text


def test_models_table_has_the_real_numbers_of_parameters(capsys: Capture):
    rows = {row["name"]: row for row in answer(capsys, "list", "models")}
    assert list(rows) == list(networks)
    for operator in ("conv", "tanh-cos"):
        model = dcnet.create_model("cnn9-small", operator, 100)
        assert rows["cnn9-small"]["parameters"][operator] == sum(p.numel() for p in model.parameters())
    assert rows["resnet32"]["about"].startswith("ResNet-32 for CIFAR")


def test_datasets_and_recipes_are_those_of_the_registries(capsys: Capture):
    found = {row["name"]: row["about"] for row in answer(capsys, "list", "datasets")}
    assert found == {name: entry.about for name, entry in datasets.items()}
    margins = {row["name"]: row["about"] for row in answer(capsys, "list", "margins")}
    assert margins == {name: kind.about for name, kind in dcnet.losses.registry.items()}
    recipes = {row["name"]: row["config"] for row in answer(capsys, "list", "recipes")}
    assert recipes == {name: made().described() for name, made in RECIPES.items()}


@pytest.mark.parametrize("kind", ["operators", "models", "datasets", "recipes", "margins"])
def test_tables_fit_a_terminal_of_80_columns(kind: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert call("list", kind) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 6
    assert max(map(len, lines)) <= 80


def test_list_runs_shows_progress_and_accuracy(capsys: Capture):
    rows = {row["operator"]: row for row in answer(capsys, "list", "runs", "--runs", root())}
    for operator, run in trained().items():
        record, row = run.record(), rows[operator]
        assert (row["name"], row["status"], row["steps_done"], row["steps"]) == (run.folder.name, "done", 60, 60)
        assert row["test_accuracy"] == record.results.test_accuracy
        assert row["seconds"] == record.timings.total
    assert call("list", "runs", "--runs", root()) == 0
    text = capsys.readouterr().out
    assert "60/60" in text
    assert f"{rows['conv']['test_accuracy']:.2f}" in text


def write(folder: Path, **values: object) -> None:
    record = {"config": {"operator": "conv"}, "status": "interrupted", "curves": {"test_accuracy": [10.0, 33.25, None]}}
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(json.dumps(record | values))


def test_unfinished_run_shows_its_last_evaluation(capsys: Capture, tmp_path: Path):
    write(tmp_path / "half", steps=100, steps_done=40, environment={"date": "2026-02-01T10:00:00+00:00"})
    write(tmp_path / "afterwards", environment={"date": "2026-02-02T10:00:00+00:00"})
    write(tmp_path / "earlier", environment={"date": "2026-01-02T10:00:00+00:00"})
    assert call("list", "runs", "--runs", tmp_path) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "interrupted" in line]
    assert [line.split()[1] for line in lines] == ["earlier", "half", "afterwards"]
    assert "40/100" in lines[1]
    assert "33.25" in lines[1]


@pytest.mark.parametrize("columns", ["40", "50", "60"])
def test_narrow_terminal_truncates_nothing(
    columns: str, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", columns)
    write(tmp_path / "digits-conv-seed0-a0fb3b28", steps=42500, steps_done=17200)
    assert call("list", "runs", "--runs", tmp_path) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert max(map(len, lines)) <= int(columns)
    cells = zip(*(line.strip("│").split("│") for line in lines), strict=True)
    name, status, steps, accuracy, *_ = ["".join(part.strip() for part in column) for column in cells]
    assert (name, status) == ("digits-conv-seed0-a0fb3b28", "interrupted")
    assert (steps, accuracy) == ("17200/42500", "33.25")


def test_damaged_records_are_reported_and_the_others_listed(capsys: Capture, tmp_path: Path):
    write(tmp_path / "good")
    write(tmp_path / "odd", curves=[1, 2])
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "record.json").write_bytes(b"\xff{")
    assert call("list", "runs", "--runs", tmp_path) == 0
    output = capsys.readouterr()
    assert output.out.count("unreadable") == 2
    assert "interrupted" in output.out
    assert "broken" in output.err
    assert "is not a record of a run" in output.err


def test_empty_runs_folder_says_how_to_train(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert call("list", "runs", "--runs", tmp_path) == 0
    assert "train one with `dcnet train`" in capsys.readouterr().out
    monkeypatch.setenv("DCNET_RUNS", str(tmp_path / "none"))
    assert answer(capsys, "list", "runs") == []


def test_missing_records_folder_is_rejected(capsys: Capture, tmp_path: Path):
    assert "--runs must be a folder" in complaint(capsys, "list", "runs", "--runs", tmp_path / "none")


def test_stored_operators_match_the_registries():
    """`make results` writes the stored rows."""
    assert json.loads(listing.STORED.read_text())["rows"] == json.loads(json.dumps(listing.operator_rows()))
    assert not listing.store_operators()
