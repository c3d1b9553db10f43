"""Folders of runs: names, evaluations, locks, and networks from damaged records and weights."""

import dataclasses
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.small_runs import tiny, train, weights
from safetensors.torch import save_file

from dcnet.files import write_json
from dcnet.layers import Decoupled
from dcnet.training import (
    Evaluation,
    Record,
    Results,
    Run,
    add_evaluation,
    find_run,
    load_model,
    read_record,
    recipe,
)
from dcnet.training.build import build_model, load_run_weights_
from dcnet.training.runs import run_lock, runs_root
from dcnet.training.tensor_files import read_tensors, write_tensors


def run_with(folder: Path, status: str) -> Run:
    run = Run(folder)
    config, results = recipe("digits").described(), Results(test_accuracy=98.0)
    run.write(Record(config=config, status=status, results=results))
    return run


@pytest.mark.parametrize("status", ["done", "converted"])
def test_evaluations_are_added_by_name(status: str, tmp_path: Path):
    run = run_with(tmp_path / "run", status)
    before = run.record()
    add_evaluation(run, "faces", {"auc": 0.5})
    add_evaluation(run, "open-set", {"auc": 0.7, "open": [{"tpir": None}]})
    add_evaluation(run, "faces", {"auc": 0.6})
    found = run.record().to_json()
    assert found.pop("evaluations") == {"faces": {"auc": 0.6}, "open-set": {"auc": 0.7, "open": [{"tpir": None}]}}
    assert found == before.to_json()


def test_concurrent_evaluations_are_all_stored(tmp_path: Path):
    run = run_with(tmp_path / "run", "done")
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: add_evaluation(run, f"number {number}", {"value": number}), range(24)))
    assert run.record().evaluations == {f"number {number}": Evaluation(extra={"value": number}) for number in range(24)}


def test_an_invalid_evaluation_does_not_change_the_record(tmp_path: Path):
    run = run_with(tmp_path / "run", "done")
    before = run.record_file.read_bytes()
    with pytest.raises(ValueError, match="not JSON compliant"):
        add_evaluation(run, "faces", {"auc": float("nan")})
    with pytest.raises(ValueError, match="name of an evaluation must not be empty"):
        add_evaluation(run, "", {})
    assert run.record_file.read_bytes() == before
    with pytest.raises(ValueError, match="there is no record at"):
        add_evaluation(Run(tmp_path / "none"), "faces", {})
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("status", ["running", "interrupted", "diverged"])
def test_unfinished_runs_store_no_evaluations(status: str, tmp_path: Path):
    with pytest.raises(ValueError, match=f"evaluations need a finished run, but the status of 'run' is '{status}'"):
        add_evaluation(run_with(tmp_path / "run", status), "faces", {})


def test_run_lock_is_exclusive(tmp_path):
    with (
        run_lock(tmp_path / "run"),
        pytest.raises(ValueError, match="another process is using"),
        run_lock(tmp_path / "run"),
    ):
        pass


def test_run_lock_removes_a_new_folder_that_stays_empty(tmp_path):
    with pytest.raises(RuntimeError), run_lock(tmp_path / "run"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_run_lock_keeps_existing_and_used_folders(tmp_path):
    (tmp_path / "before").mkdir()
    for name in ("before", "new"):
        with run_lock(tmp_path / name):
            if name == "new":
                (tmp_path / name / "record.json").write_text("{}")
    assert (tmp_path / "before").is_dir()
    assert (tmp_path / "new" / "record.json").read_text() == "{}"


CONFIG = recipe("digits", width=0.1, steps=2)
DATA = {"classes": list("0123456789"), "channels": 1, "image_size": 8}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with untrained weights."""
    made = Run(tmp_path / "run")
    write_tensors(made.model_file, build_model(CONFIG, 10, 1, 8).state_dict(), {})
    write_json(made.record_file, {"status": "done", "config": CONFIG.described(), "curves": {}, "data": DATA})
    return made


def changed(run: Run, part: str, **values: Any) -> Run:
    record = run.record().to_json()
    record[part] = {**record[part], **values}
    run.record_file.write_text(json.dumps(record))
    return run


def sentence(work: Any) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        work()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    return str(caught.value)


def test_a_network_larger_than_its_weights_is_not_built(run: Run):
    assert load_model(run)[1].status == "done"
    message = sentence(lambda: load_model(changed(run, "config", width=1e5)))
    assert "the record describes a network of 5,120,000,748,8" in message
    assert "but its weights have 5,8" in message


@pytest.mark.parametrize(
    ("part", "values"),
    [
        ("data", {"image_size": 10**9}),
        ("data", {"channels": 10**9}),
        ("data", {"classes": 10}),
        ("config", {"schedule": {"name": "none"}}),
        ("config", {"schedule": {"name": "step", "milestones": 3}}),
        ("config", {"augmentation": {"strange": 1}}),
        ("config", {"operator": "linear&" * 1000}),
        ("config", {"model": "../../x"}),
        ("config", {"unheard": 1}),
    ],
)
def test_an_invalid_network_description_raises_one_sentence(run: Run, part: str, values: dict[str, Any]):
    sentence(lambda: load_model(changed(run, part, **values)))


def test_a_record_without_data_raises_one_sentence(run: Run):
    record = run.record().to_json()
    write_json(run.record_file, {name: value for name, value in record.items() if name != "data"})
    assert "does not describe its network: it lacks data.classes" in sentence(lambda: load_model(run))


@pytest.mark.parametrize("name", ["dataset", "model", "operator"])
def test_a_config_without_its_network_raises_one_sentence(run: Run, name: str):
    record = run.record()
    del record.config[name]
    run.write(record)
    assert f"does not describe its network: it lacks config.{name}" in sentence(lambda: load_model(run))


def test_a_pipe_instead_of_weights_does_not_block(run: Run):
    run.model_file.unlink()
    os.mkfifo(run.model_file)
    assert "it is not a regular file" in sentence(lambda: load_model(run))
    assert "it is not a regular file" in sentence(lambda: read_tensors(run.model_file))


HEADS = {
    "larger than the file": (1 << 40).to_bytes(8, "little") + b"{}",
    "no JSON": (2).to_bytes(8, "little") + b"[[",
    "nested": (50_000).to_bytes(8, "little") + b"[" * 50_000,
    "places outside": b'{"x":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}',
    "a shape without end": b'{"x":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}}',
    "another type": b'{"x":{"dtype":"X9","shape":[1],"data_offsets":[0,4]}}',
}


@pytest.mark.parametrize("name", HEADS)
def test_crafted_file_headers_raise_one_sentence(name: str, tmp_path: Path):
    head, file = HEADS[name], tmp_path / "x.safetensors"
    file.write_bytes((len(head).to_bytes(8, "little") if head.startswith(b"{") else b"") + head + bytes(4))
    assert "x.safetensors' is not a whole file of tensors" in sentence(lambda: read_tensors(file))
    model = build_model(CONFIG, 10, 1, 8)
    sentence(lambda: load_run_weights_(model, str(file)))


def test_weights_of_other_shapes_raise_one_sentence(run: Run, tmp_path: Path):
    other = build_model(dataclasses.replace(CONFIG, width=0.2), 10, 1, 8).state_dict()
    write_tensors(run.model_file, other, {})
    assert "in this network, but" in sentence(lambda: load_model(run))
    write_tensors(run.model_file, {name: value.reshape(-1)[:1] for name, value in other.items()}, {})
    sentence(lambda: load_model(run))
    save_file({"x": torch.ones(2)}, tmp_path / "x.safetensors")
    sentence(lambda: load_run_weights_(build_model(CONFIG, 10, 1, 8), str(tmp_path / "x.safetensors")))


def test_clear_removes_the_record_first(tmp_path, monkeypatch):
    run, _ = train(tiny(epochs=1), tmp_path)
    gone = []
    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda self, **how: (gone.append(self.name), unlink(self, **how)))
    run.clear()
    assert gone[0] == "record.json"


def test_find_run_prefers_an_exact_name_to_a_prefix(tmp_path):
    run, _ = train(tiny(epochs=1), tmp_path)
    for name in ("best", "best2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.json").write_bytes(run.record_file.read_bytes())
    assert find_run("best", tmp_path).folder.name == "best"
    with pytest.raises(ValueError, match="'bes' is ambiguous, it matches 2 runs: best, best2"):
        find_run("bes", tmp_path)
    for name in ("best3", "best4", "best5"):
        shutil.copytree(tmp_path / "best", tmp_path / name)
    with pytest.raises(ValueError, match=r"'bes' is ambiguous, it matches 5 runs: best, best2, best3, best4, \.\.\.$"):
        find_run("bes", tmp_path)


@pytest.mark.parametrize(("given", "expected"), [("", "runs"), ("~/elsewhere", os.path.expanduser("~/elsewhere"))])
def test_runs_root_reads_the_environment_variable(given, expected, monkeypatch):
    monkeypatch.setenv("DCNET_RUNS", given)
    assert runs_root() == Path(expected)


def test_weights_of_older_versions_without_batch_counts_load(tmp_path):
    run, _ = train(tiny(epochs=1), tmp_path)
    tensors, notes = read_tensors(run.model_file)
    norms = {name.removesuffix("mean_norm") for name in tensors if name.endswith("mean_norm")}
    old = {name: value for name, value in tensors.items() if name.removesuffix("num_batches_tracked") not in norms}
    assert len(old) == len(tensors) - len(norms) < len(tensors)
    write_tensors(run.model_file, old, notes)
    layers = [layer for layer in load_model(run)[0].modules() if isinstance(layer, Decoupled)]
    assert {layer.num_batches_tracked.item() for layer in layers} == {8990}


def test_find_run_accepts_folders_files_and_parts_of_names(tmp_path):
    root = tmp_path / "runs"
    run, _ = train(tiny(), root)
    for text in (str(run.folder), str(run.record_file), run.folder.name, "digits-cnn9", run.folder.name[-8:]):
        assert find_run(text, root) == run
    train(tiny(seed=3), root)
    with pytest.raises(ValueError, match="is ambiguous, it matches 2 runs"):
        find_run("digits", root)
    with pytest.raises(ValueError, match="no run 'nothing'"):
        find_run("nothing", root)
    with pytest.raises(ValueError, match="no record at"):
        read_record(tmp_path)


def test_weights_of_another_network_raise_an_error(tmp_path):
    run, _ = train(tiny(), tmp_path)
    changed = run.record()
    changed.config["width"] = 0.2
    other = Run(tmp_path / "other")
    other.write(changed)
    other.model_file.write_bytes(weights(run))
    with pytest.raises(ValueError, match=r"in this network, but .* in the file"):
        load_model(other)
    changed.config |= {"width": 0.1, "operator": "conv"}
    other.write(changed)
    with pytest.raises(ValueError, match="of another network"):
        load_model(other)
