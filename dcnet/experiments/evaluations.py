"""What is measured of trained networks beside their test error, by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dcnet.spec import unknown
from dcnet.training import Run, load_model

# The trained network in evaluation mode on its device, the record of its run, the folder of runs, and that of the data.
Evaluate = Callable[[nn.Module, dict[str, Any], Path, Path | None], dict[str, Any]]

evaluations: dict[str, Evaluate] = {}


def register(name: str) -> Callable[[Evaluate], Evaluate]:
    """A decorator that enters an evaluation under its name."""

    def enter(evaluate: Evaluate) -> Evaluate:
        if name in evaluations:
            raise ValueError(f"{name!r} is taken: there is an evaluation of that name")
        evaluations[name] = evaluate
        return evaluate

    return enter


def carry_out(name: str, run: Run, data_dir: Path | None, device: torch.device) -> dict[str, Any]:
    """Evaluates the network of a run."""
    if name not in evaluations:
        raise unknown("evaluation", name, evaluations)
    model, record = load_model(run)
    return evaluations[name](model.to(device), record, run.folder.parent, data_dir)
