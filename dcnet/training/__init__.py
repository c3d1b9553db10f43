"""Training: a config goes in, a record and trained weights come out."""

from dcnet.training.config import RunConfig, config_of
from dcnet.training.divergence import DivergenceError
from dcnet.training.execution import Execution
from dcnet.training.progress import Shown
from dcnet.training.recipes import RECIPES, recipe
from dcnet.training.records import add_evaluation
from dcnet.training.runs import Run, all_runs, find_run, load_model, read_record
from dcnet.training.trainer import Trainer
from dcnet.training.watching import Watcher

__all__ = [
    "RECIPES",
    "DivergenceError",
    "Execution",
    "Run",
    "RunConfig",
    "Shown",
    "Trainer",
    "Watcher",
    "add_evaluation",
    "all_runs",
    "config_of",
    "find_run",
    "load_model",
    "read_record",
    "recipe",
]
