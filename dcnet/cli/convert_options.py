"""What a conversion starts from, and the folder of a run that it leaves."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from dcnet.training import Run, RunConfig

# A run that was converted has done nothing of its own yet.
STATUS = "converted"


@dataclass(frozen=True)
class Source:
    """The record of a run, and the file with its weights, which may be one of its checkpoints."""

    run: Run
    weights: Path
    record: dict[str, Any]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Classes, channels and image size."""
        data = self.record["data"]
        return len(data["classes"]), data["channels"], data["image_size"]

    def config(self) -> RunConfig:
        from dcnet.training import config_of

        return config_of(self.record["config"])

    def model(self) -> nn.Module:
        """The network with its weights, in evaluation mode."""
        from dcnet.training.build import build_model
        from dcnet.training.checkpoints import read_tensors
        from dcnet.training.state import MODEL, load_weights_

        model = build_model(self.config(), *self.shape)
        tensors, _ = read_tensors(self.weights)
        load_weights_(model, {name: value for name, value in tensors.items() if name.startswith(MODEL)})
        return model.eval()


def find_source(text: str, root: Path) -> Source:
    """A run by its folder or name, or a file of weights in the folder of one."""
    from dcnet.training import Run, find_run
    from dcnet.training.identity import check_has_builder

    path = Path(text)
    if path.suffix != ".safetensors":
        run = find_run(text, root)
        path = run.model_file
    else:
        run = Run(path.parent.parent if path.parent.name == "checkpoints" else path.parent)
    record = run.record()
    check_has_builder(record, run.folder.name)
    if not path.is_file():
        raise ValueError(f"there are no weights at {str(path)!r}: the status of the run is {record['status']!r}")
    return Source(run, path, record)


def with_operator(source: Source, operator: str) -> tuple[RunConfig, nn.Module, list[str]]:
    """The config with another operator, its network with the weights of the source, and the names of what is new."""
    from dcnet.training.build import build_model, start_from_

    config = _changed(source, operator)
    model = build_model(config, *source.shape)
    return config, model.eval(), start_from_(model, str(source.weights))


def _changed(source: Source, operator: str) -> RunConfig:
    from dcnet.operator import Operator, is_plain

    before = source.config()
    # With its origin in it, the new run cannot be taken for one that was trained with this operator from the start.
    changes: dict[str, Any] = {"operator": operator, "pretrained": str(source.weights)}
    if not is_plain(operator) and Operator.parse(operator).weighted:
        # What only unweighted filters can be trained with.
        changes |= {"projection_every": 0, "weighted_gradients": "none"}
    config = dataclasses.replace(before, **changes)
    if config.operator == before.operator:
        raise ValueError(f"the run has the operator {config.operator!r} already: give another one")
    return config


def free_folder(asked: Path | None, source: Source, config: RunConfig) -> Run:
    """The folder for the new run, which must not hold one already."""
    from dcnet.report.options import writable
    from dcnet.training import Run

    folder = asked or source.run.folder.parent / f"{STATUS}-{config.name}-{config.hash}"
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ValueError(f"{str(folder)!r} is there already: give the name of a new folder with --out")
    writable(str(folder / "record.json"))
    return Run(folder)


def write_run(run: Run, config: RunConfig, model: nn.Module, source: Source, statistics: str) -> None:
    """Weights and record; the record has no curves and no results, since nothing was trained and nothing tested.

    `statistics` is the operator that the running statistics of the model are of.
    """
    from dcnet.training.build import STATISTICS
    from dcnet.training.checkpoints import write_tensors
    from dcnet.training.state import MODEL

    weights = {MODEL + name: value for name, value in model.state_dict().items()}
    write_tensors(run.model_file, weights, {"config": config.described(), STATISTICS: statistics})
    parameters = sum(parameter.numel() for parameter in model.parameters())
    run.write(_record(config, source) | {"parameters": parameters})


def _record(config: RunConfig, source: Source) -> dict[str, Any]:
    from dcnet.environment import commit, environment
    from dcnet.training.records import CURVES

    before = source.record
    return {
        "name": config.name,
        "hash": config.hash,
        "status": STATUS,
        "command": shlex.join(["dcnet", *sys.argv[1:]]),
        "commit": commit(),
        "config": config.described(),
        "environment": environment(),
        "data": before["data"],
        "steps": 0,
        "steps_done": 0,
        "curves": {name: [] for name in CURVES},
        "results": None,
        "converted_from": {name: before.get(name) for name in ("name", "hash", "results")},
    }
