"""Files of tensors: round trips, parts of tensors, and files that are damaged or of other programs."""

import json

import pytest
import torch
from helpers.damage import WAYS, damage
from safetensors.torch import load_file, save_file

from dcnet.training.checkpoints import Checkpoints
from dcnet.training.tensor_files import TensorFile, _sum, read_tensors, stream_tensors, write_tensors

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


ODD = {
    "bool": torch.tensor([True, False, True]),
    "double": torch.randn(3, 5, 2, dtype=torch.float64),
    "empty": torch.empty(0, 4),
    "number": torch.tensor(7, dtype=torch.int16),
    "small": torch.randn(3).to(torch.float8_e5m2),
}


def test_other_programs_can_read_the_file(tmp_path):
    """Items of several sizes are aligned."""
    write_tensors(tmp_path / "x.safetensors", ODD, {"long": "é" * 100})
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == ODD.keys()
    for name, value in ODD.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name].double(), value.double())


@pytest.mark.parametrize("name", ODD)
def test_a_part_of_a_tensor_is_read(tmp_path, name):
    write_tensors(tmp_path / "x.safetensors", ODD, {"n": 1})
    file, value = TensorFile(tmp_path / "x.safetensors"), ODD[name]
    file.check_sum()
    assert file.notes == {"n": 1}
    assert torch.equal(file.read(name).float(), value.float())
    if value.dim() and len(value):
        offsets, lengths = [1] * value.dim(), [size - 1 for size in value.shape]
        assert torch.equal(file.read(name, offsets, lengths).float(), value[(slice(1, None),) * value.dim()].float())


def test_tensors_are_asked_for_one_after_another(tmp_path):
    """Or in several pieces, as they are."""
    asked = []

    def pieces_of(name):
        asked.append(name)
        value = TENSORS[name]
        return value.split(1) if value.dim() else [value]

    layout = {name: (value.dtype, value.shape) for name, value in reversed(TENSORS.items())}
    stream_tensors(tmp_path / "streamed.safetensors", layout, pieces_of, {})
    write_tensors(tmp_path / "whole.safetensors", TENSORS, {})
    assert asked == sorted(TENSORS)
    assert (tmp_path / "streamed.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


def test_an_error_while_streaming_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "x.safetensors"
    write_tensors(path, TENSORS, {"old": True})
    with pytest.raises(KeyError):
        stream_tensors(path, {"x": (torch.float32, (1,))}, TENSORS.__getitem__, {})
    assert read_tensors(path)[1] == {"old": True}
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("how", WAYS)
def test_a_damaged_file_raises_without_reading_its_tensors(tmp_path, how):
    path = tmp_path / "x.safetensors"
    write_tensors(path, ODD, {"at": 1111})
    path.write_bytes(damage(path.read_bytes(), how))
    with pytest.raises(ValueError, match=r"x.safetensors' (is damaged|is not a whole file)"):
        TensorFile(path).check_sum()


HEADERS = {
    "huge": {"x": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 8]}},
    "negative": {"x": {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}},
    "float": {"x": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}},
    "unknown dtype": {"x": {"dtype": "F2", "shape": [2], "data_offsets": [0, 8]}},
    "no offsets": {"x": {"dtype": "F32", "shape": [2]}},
    "a list": {"x": []},
    "metadata of another kind": {"__metadata__": [1], "x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
    "overlapping": {name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for name in "xy"},
    "beyond the end": {"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}},
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
@pytest.mark.parametrize("read", [TensorFile, read_tensors])
def test_crafted_headers_raise_one_sentence(tmp_path, header, read):
    path = tmp_path / "x.safetensors"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(ValueError, match=r"x.safetensors' is not a whole file of tensors"):
        read(path)


def test_a_huge_header_is_not_read(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes((2**60).to_bytes(8, "little") + b"{}")
    with pytest.raises(ValueError, match=r"its header has 1,152,921,504,606,846,976 bytes"):
        TensorFile(path)
