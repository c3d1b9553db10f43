"""The device of a run."""

import accelerate.state
import pytest
import torch
from helpers.small_runs import tiny

from dcnet.training import Execution
from dcnet.training.setup import make_accelerator


def test_without_an_nvidia_gpu_the_device_is_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(accelerate.state, "is_mps_available", lambda *_, **__: True)
    assert make_accelerator(tiny(), Execution(), tmp_path).device.type == "cpu"
    with pytest.raises(ValueError, match="torch finds no GPU: use cpu"):
        make_accelerator(tiny(), Execution(device="cuda"), tmp_path)
