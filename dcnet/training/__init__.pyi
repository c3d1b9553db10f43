from dcnet.training import config as config
from dcnet.training import conversion as conversion
from dcnet.training import evaluation as evaluation
from dcnet.training import identity as identity
from dcnet.training import image_input as image_input
from dcnet.training import runs as runs
from dcnet.training import schedules as schedules
from dcnet.training import session as session
from dcnet.training.config import RunConfig, config_of
from dcnet.training.recipes import RECIPES, recipe
from dcnet.training.record import Evaluation, Record, Results, read_record
from dcnet.training.runs import Run, add_evaluation, all_runs, find_run, load_model
from dcnet.training.session import ProgressBar
from dcnet.training.setup import Execution
from dcnet.training.state import archive_state, load_archive, load_state, save_state
from dcnet.training.trainer import Callback, DivergenceError, Trainer

__all__ = [
    "RECIPES",
    "Callback",
    "DivergenceError",
    "Evaluation",
    "Execution",
    "ProgressBar",
    "Record",
    "Results",
    "Run",
    "RunConfig",
    "Trainer",
    "add_evaluation",
    "all_runs",
    "archive_state",
    "config_of",
    "find_run",
    "load_archive",
    "load_model",
    "load_state",
    "read_record",
    "recipe",
    "save_state",
]
