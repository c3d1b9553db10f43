"""Checkpoints: round trips, damaged and unreadable files, disk space."""

import errno
import os

import pytest
import torch
from helpers.damage import WAYS, damage

from dcnet.files import open_regular
from dcnet.training.checkpoints import KEPT, Checkpoints, check_room, resume_record
from dcnet.training.record import DataDescription, Record
from dcnet.training.tensor_files import read_tensors

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b.c": torch.tensor(3), "half": torch.ones(5, dtype=torch.bfloat16)}


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert checkpoints.newest() == (None, [])
    for step in (8, 9, 10, 100):
        checkpoints.save(step, {"x": torch.tensor(step)}, {})
    assert [path.name for path in checkpoints.files()] == ["step-00000010.safetensors", "step-00000100.safetensors"]
    assert len(checkpoints.files()) == KEPT
    found, complaints = checkpoints.newest()
    assert (found.step, found.shards.read("x").item(), complaints) == (100, 100, [])


@pytest.mark.parametrize("how", WAYS)
def test_a_damaged_checkpoint_falls_back_to_the_previous_one(tmp_path, how):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        newest = checkpoints.save(step, TENSORS, {"at": step * 1111})
    newest.write_bytes(damage(newest.read_bytes(), how))
    found, complaints = checkpoints.newest()
    assert (found.step, found.notes) == (1, {"at": 1111})
    assert len(complaints) == 1
    assert newest.name in complaints[0]


def test_temporary_files_are_ignored_and_removed(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, TENSORS, {})
    leftover = tmp_path / ".step-00000002.safetensors.123.tmp"
    leftover.write_bytes(b"half")
    assert checkpoints.newest()[0].step == 1
    checkpoints.remove_leftovers()
    assert not leftover.exists()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_an_unreadable_checkpoint_is_not_treated_as_damaged(tmp_path, monkeypatch, number):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        newest = checkpoints.save(step, TENSORS, {})

    def unreadable(path):
        if path == newest:
            raise OSError(number, os.strerror(number))
        return open_regular(path)

    monkeypatch.setattr("dcnet.training.tensor_files.open_regular", unreadable)
    for read in (checkpoints.newest, lambda: read_tensors(newest)):
        with pytest.raises(OSError, match=f"{os.strerror(number)}: '{newest}'"):
            read()


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_folders_and_broken_links_are_not_treated_as_damaged_checkpoints(tmp_path, kind):
    """A broken link may point to a disk that is not mounted."""
    checkpoints = Checkpoints(tmp_path)
    newest = checkpoints.save(1, TENSORS, {}).with_name("step-00000002.safetensors")
    newest.mkdir() if kind == "folder" else newest.symlink_to("nowhere")
    with pytest.raises(OSError, match=newest.name):
        checkpoints.newest()


@pytest.mark.parametrize("notes", [{}, {"hash": "1", "resumed_at": 5, "curves": {}, "seconds": {}}])
def test_resume_requires_the_notes_of_a_training_checkpoint(notes):
    with pytest.raises(ValueError, match="the checkpoint at step 7 lacks the state of training"):
        resume_record(Record(hash="1", data=DataDescription(train_images=1)), notes, 7)


def test_a_failed_write_keeps_the_previous_checkpoint(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, TENSORS, {})

    def full(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*step-00000002.safetensors'"):
        checkpoints.save(2, TENSORS, {})
    assert checkpoints.newest()[0].step == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001.safetensors"]


def test_check_room_raises_an_error_for_a_full_disk(tmp_path):
    class Huge(torch.nn.Module):
        def state_dict(self):
            return {"x": torch.empty(2**50, device="meta")}

    with pytest.raises(OSError, match=r"MiB left, but the checkpoints of this run need .*--runs"):
        check_room(tmp_path, Huge())
    check_room(tmp_path, torch.nn.Linear(2, 2))
