"""Records say where they were measured."""

import os
import subprocess
import sys

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


# --- cores ---


def test_workers_and_threads_follow_the_cores_that_a_process_may_use(monkeypatch: pytest.MonkeyPatch):
    """torch warns of more workers than that, and a cluster may grant one core of many."""
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
def test_workers_are_shared_by_the_processes_that_train(
    monkeypatch: pytest.MonkeyPatch, cores: int, processes: int, workers: int
):
    monkeypatch.setattr(environment, "available_cores", lambda: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    assert environment.default_workers() == workers
