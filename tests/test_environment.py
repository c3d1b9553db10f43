"""Records say where they were measured."""

import pytest
import torch

from dcnet import environment


def test_a_machine_without_a_gpu_says_nothing_of_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert {"cpu", "cores", "threads", "torch", "dcnet"} <= set(environment.environment())
    assert not {"gpu", "cuda"} & set(environment.environment())


def test_a_gpu_is_named_with_what_runs_on_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"NVIDIA {index}")
    found = environment.environment()
    assert found["gpu"] == "NVIDIA 0"
    assert {"cuda", "cudnn", "triton"} <= set(found)


def test_a_package_that_is_not_there_has_no_version():
    assert environment._version("no-such-package") is None
    assert environment._version("torch")
