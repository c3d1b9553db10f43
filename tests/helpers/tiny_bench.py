"""`dcnet bench` with small workloads."""

import os
from unittest import mock

import torch

from dcnet.cli.app import main

TINY = {
    "layers": ["--shapes", "N2xC4x6", "--operators", "tanh-cos", "--variants", "eager", "naive"],
    "blocks": ["--shapes", "N2xC4x6", "--operators", "tanh-cos", "--blocks", "2"],
    "network": ["--model", "cnn9-small", "--width", "0.1", "--batch", "2", "--size", "8"],
    "heads": ["--classes", "50", "500", "--batch", "8", "--features", "16", "--seconds", "0.01"],
    "inference": [
        "--networks",
        "cnn9-small",
        "--width",
        "0.1",
        "--batch",
        "2",
        "--size",
        "8",
        "--operators",
        "tanh-cos",
    ],
}


def bench(name: str, *arguments: str) -> int:
    """The exit code of `dcnet bench NAME`; the arguments replace the options of the small workload."""
    own = [*TINY[name], "--device", "cpu", "--repeats", "3", "--warmup", "1"]
    own += ["--threads", str(torch.get_num_threads())]
    # Wide enough for whole lines in any terminal.
    with mock.patch.dict(os.environ, COLUMNS="160"):
        return main(["bench", name, *own, *arguments])
