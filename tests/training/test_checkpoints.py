"""Checkpoints: round trips, damaged and unreadable files, disk space."""

import errno
import json
import os

import pytest
import torch
from safetensors.torch import save_file

from dcnet.files import open_regular
from dcnet.training.checkpoints import KEPT, Checkpoints, check_room, resume_record
from dcnet.training.record import DataDescription, Record
from dcnet.training.tensor_files import _sum, read_tensors, write_tensors

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b.c": torch.tensor(3), "half": torch.ones(5, dtype=torch.bfloat16)}


def test_tensors_and_notes_round_trip(tmp_path):
    write_tensors(tmp_path / "x.safetensors", TENSORS, {"n": [1, None, 0.1]})
    tensors, notes = read_tensors(tmp_path / "x.safetensors")
    assert notes == {"n": [1, None, 0.1]}
    assert tensors.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert torch.equal(tensors[name], value)
        assert tensors[name].dtype == value.dtype


def test_any_memory_layout_can_be_written(tmp_path):
    tensors = {"last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), "t": torch.randn(3, 4).T}
    write_tensors(tmp_path / "x.safetensors", tensors, {})
    found, _ = read_tensors(tmp_path / "x.safetensors")
    assert all(torch.equal(found[name], value) for name, value in tensors.items())


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert checkpoints.newest() == (None, [])
    for step in (8, 9, 10, 100):
        checkpoints.save(step, {"x": torch.tensor(step)}, {})
    assert [path.name for path in checkpoints.files()] == ["step-00000010.safetensors", "step-00000100.safetensors"]
    assert len(checkpoints.files()) == KEPT
    found, complaints = checkpoints.newest()
    assert (found.step, found.tensors["x"].item(), complaints) == (100, 100, [])


def damage(content, how):
    if how == "cut":
        return content[: len(content) // 2]
    if how == "empty":
        return b""
    if how == "cut in the header":
        return content[:20]
    place = len(content) - 3 if how == "a byte of a tensor" else content.index(b"notes") + 12
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@pytest.mark.parametrize("how", ["cut", "empty", "cut in the header", "a byte of a tensor", "a byte of the notes"])
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


def test_files_of_other_programs_raise_an_error(tmp_path):
    save_file({"x": torch.ones(2)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"x.safetensors' was not written by dcnet: expected model"):
        read_tensors(tmp_path / "x.safetensors")
    save_file({"x": torch.ones(2)}, tmp_path / "y.safetensors", {"dcnet": '{"notes": "{}", "sum": 1}'})
    with pytest.raises(ValueError, match="is damaged"):
        read_tensors(tmp_path / "y.safetensors")
    with pytest.raises(ValueError, match="not a whole file of tensors"):
        read_tensors(tmp_path / "none.safetensors")


CRAFTED = {
    "nested": "[" * 100_000,
    "a list": "[]",
    "a number": "1",
    "no JSON": "{",
    "notes of another kind": '{"notes": {"a": 1}, "sum": 1}',
}


@pytest.mark.parametrize("metadata", CRAFTED.values(), ids=CRAFTED)
def test_crafted_metadata_raises_one_sentence(tmp_path, metadata):
    save_file({"x": torch.ones(2)}, tmp_path / "step-00000001.safetensors", {"dcnet": metadata})
    with pytest.raises(
        ValueError, match=r"step-00000001.safetensors' (was not written by dcnet|is not a whole file)"
    ) as caught:
        read_tensors(tmp_path / "step-00000001.safetensors")
    assert len(str(caught.value)) < 1000
    assert Checkpoints(tmp_path).newest()[0] is None


@pytest.mark.parametrize("notes", ["[" * 100_000, "[]", "1", "{"], ids=["nested", "a list", "a number", "no JSON"])
def test_crafted_notes_raise_one_sentence(tmp_path, notes):
    tensors, path = {"x": torch.ones(2)}, tmp_path / "x.safetensors"
    about = {"notes": notes, "sum": _sum(tensors, notes)}
    save_file(tensors, path, {"dcnet": json.dumps(about)})
    with pytest.raises(ValueError, match=r"x.safetensors' has notes that cannot be read"):
        read_tensors(path)


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
