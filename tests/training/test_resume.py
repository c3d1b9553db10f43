"""What a run that goes on needs, what it does without, and what it refuses."""

import dataclasses
import shutil

import pytest
import torch
from small_runs import ON_CPU, InterruptsAt, Remembers, tiny, train

from dcnet.data import load_dataset
from dcnet.training import Run, Trainer
from dcnet.training.meter import Meter


def test_the_start_is_not_needed_any_more(tmp_path):
    plain, _ = train(tiny(operator="conv"), tmp_path)
    config = tiny(pretrained=str(plain.folder))
    whole, _ = train(config, tmp_path / "whole")
    train(config, tmp_path / "parts", watcher=InterruptsAt(4))
    shutil.rmtree(plain.folder)
    parts, record = train(config, tmp_path / "parts")
    assert record["status"] == "done"
    assert parts.model_file.read_bytes() == whole.model_file.read_bytes()


def test_other_classes_are_refused(tmp_path):
    data = load_dataset("digits")
    train(tiny(), tmp_path, watcher=InterruptsAt(4), dataset=data)
    other = dataclasses.replace(data, classes=tuple("abcdefghij"))
    with pytest.raises(ValueError, match=r"begun with the classes 0, 1, 2, \.\.\., and the data have a, b, c"):
        train(tiny(), tmp_path, dataset=other)


def test_other_images_than_at_the_start_are_refused(tmp_path):
    """Epochs would change their length on the way, as where files were added to a folder."""
    data, config = load_dataset("digits"), tiny(train_images=None, steps=5)
    run, _ = train(config, tmp_path, watcher=InterruptsAt(4), dataset=data)
    fewer = dataclasses.replace(data, train=data.train.first(590, 10))
    with pytest.raises(ValueError, match="the run was begun with 600 training images, and there are 590 now"):
        train(config, tmp_path, dataset=fewer)
    # What is there of the run is left for those who have its images.
    assert run.record()["status"] == "interrupted"
    assert train(config, tmp_path, dataset=data)[1]["status"] == "done"


def test_the_only_checkpoint_is_damaged(tmp_path):
    run, _ = train(tiny(), tmp_path, watcher=InterruptsAt(4))
    (only,) = run.checkpoints.files()
    only.write_bytes(b"")
    watcher = Remembers()
    _, record = train(tiny(), tmp_path, watcher=watcher)
    assert record["status"] == "done"
    assert "resumed_at" not in record
    assert watcher.notes[0].endswith("; the run begins anew")


def test_what_interrupted_writes_left_behind_is_removed(tmp_path):
    run = Run.of(tiny(), tmp_path)
    run.folder.mkdir()
    leftovers = [run.folder / name for name in (".record.json.1.tmp", ".model.safetensors.1.tmp")]
    for path in leftovers:
        path.write_text("")
    Trainer(tiny(), run, ON_CPU)
    assert not any(path.exists() for path in leftovers)


def test_what_others_put_beside_the_checkpoints_stays(tmp_path):
    run, _ = train(tiny(), tmp_path, watcher=InterruptsAt(4))
    kept = run.checkpoints.folder / "kept.safetensors"
    shutil.copy(run.checkpoints.files()[0], kept)
    _, record = train(tiny(), tmp_path)
    assert record["status"] == "done"
    assert list(run.checkpoints.folder.iterdir()) == [kept]


def test_of_several_processes_one_takes_the_sums_over():
    """A checkpoint has the sums of all, which must be there once when they go on."""
    cpu = torch.device("cpu")
    saved = Meter(cpu, join=lambda value: 2 * value)
    saved.add(torch.tensor(1.0), torch.tensor(3), 10)
    state = saved.state()
    assert state["meter.totals"].tolist() == [20, 6, 20]
    totals = []
    for is_first in (True, False):
        meter = Meter(cpu, is_first=is_first)
        meter.restore_(state)
        assert meter.step == 1
        totals.append(meter.totals.tolist())
    assert totals == [[20, 6, 20], [0, 0, 0]]
