"""The description of the machine in records, and the number of workers."""

import os
import subprocess
import sys

import pytest
import torch

from dcnet import environment


def test_environment_without_a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert {"cpu", "cores", "threads", "torch", "dcnet"} <= set(environment.environment())
    assert not {"gpu", "cuda"} & set(environment.environment())


def test_environment_with_a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"NVIDIA {index}")
    # A CUDA build of torch compares it with the capability of the GPUs, and there may be none here.
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    found = environment.environment()
    assert found["gpu"] == "NVIDIA 0"
    assert found["cudnn"] == 91900
    assert {"cuda", "triton"} <= set(found)


def test_version_of_a_missing_package():
    assert environment._version("no-such-package") is None
    assert environment._version("torch")


def test_workers_and_threads_follow_cpu_affinity(monkeypatch: pytest.MonkeyPatch):
    """torch warns about more workers than cores, and a cluster may grant one core of many."""
    one = min(os.sched_getaffinity(0))
    code = (
        f"import os; os.sched_setaffinity(0, [{one}]); import torch; "
        "from dcnet.environment import available_cores, default_workers; from dcnet.training import Execution; "
        "print(available_cores(), default_workers(), Execution().workers, torch.get_num_threads())"
    )
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["1"] * 4


@pytest.mark.parametrize(("cores", "processes", "workers"), [(2, 1, 2), (64, 1, 8), (8, 4, 2), (2, 4, 1)])
def test_workers_are_divided_among_processes(monkeypatch: pytest.MonkeyPatch, cores: int, processes: int, workers: int):
    monkeypatch.setattr(environment, "available_cores", lambda: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    assert environment.default_workers() == workers


def test_a_given_commit_comes_before_that_of_the_repository(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DCNET_COMMIT", "1234abcd")
    assert environment.commit() == "1234abcd"
    monkeypatch.delenv("DCNET_COMMIT")
    assert environment.commit() != "1234abcd"
