"""A calibration is read as it was written, and is that of one file of weights."""

import dataclasses
import hashlib

import pytest
import torch

from dcnet.verification import Calibration, calibrate, fingerprint


def made() -> Calibration:
    decision = calibrate(torch.tensor([0.5, 0.75]), torch.tensor([0.0, 0.25]), far=0.1, frr=0.1)
    return Calibration(decision, {"list": "pairs.csv", "pairs": 4}, "abc", flip=False)


def test_it_is_read_as_it_was_written(tmp_path):
    made().save(tmp_path / "new" / "verification.json")
    assert Calibration.load(tmp_path / "new" / "verification.json") == made()
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["verification.json"]


def test_what_cannot_be_written_leaves_what_was_there(tmp_path):
    made().save(tmp_path / "kept.json")
    with pytest.raises(ValueError, match="JSON"):
        dataclasses.replace(made(), data={"pairs": float("nan")}).save(tmp_path / "kept.json")
    assert Calibration.load(tmp_path / "kept.json") == made()


@pytest.mark.parametrize("text", ["", "[]", '{"decision": {}}', '{"decision": 1, "data": 1, "weights": 1, "flip": 1}'])
def test_what_is_none_is_refused_by_name(tmp_path, text):
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ValueError, match=r"other\.json' is not a calibration: "):
        Calibration.load(tmp_path / "other.json")
    with pytest.raises(ValueError, match=r"none\.json' is not a calibration: .*No such file"):
        Calibration.load(tmp_path / "none.json")


def test_the_fingerprint_is_the_checksum_of_the_file(tmp_path):
    (tmp_path / "weights").write_bytes(b"weights")
    assert fingerprint(tmp_path / "weights") == hashlib.sha256(b"weights").hexdigest()
