"""The device of a run, and when its steps are captured."""

from types import SimpleNamespace
from typing import Any

import accelerate.state
import pytest
import torch
from helpers.small_runs import tiny
from torch import nn

from dcnet.losses import MarginSoftmax, ShardedMarginSoftmax
from dcnet.training import Execution
from dcnet.training.setup import make_accelerator, uses_graph


def test_without_an_nvidia_gpu_the_device_is_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(accelerate.state, "is_mps_available", lambda *_, **__: True)
    assert make_accelerator(tiny(), Execution(), tmp_path).device.type == "cpu"
    with pytest.raises(ValueError, match="torch finds no GPU: use cpu"):
        make_accelerator(tiny(), Execution(device="cuda"), tmp_path)


def test_steps_of_a_network_that_samples_classes_are_not_captured():
    """A custom network may have such a head without `sample_classes` in the config."""
    machine: Any = SimpleNamespace(device=torch.device("cuda"), num_processes=1)
    heads = (MarginSoftmax(4, 5, "arcface"), ShardedMarginSoftmax(4, 5, "arcface"))
    assert all(uses_graph(nn.Sequential(head), Execution(), machine) for head in heads)
    sampling = nn.Sequential(ShardedMarginSoftmax(4, 5, "arcface", sample=0.5))
    assert not uses_graph(sampling, Execution(), machine)
    with pytest.raises(ValueError, match="a head that does not sample classes: omit it"):
        uses_graph(sampling, Execution(graph=True), machine)
