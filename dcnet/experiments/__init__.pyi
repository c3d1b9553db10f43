from dcnet.experiments import catalogue
from dcnet.experiments import reproduction as reproduction
from dcnet.experiments import status as status
from dcnet.experiments.experiment import Cell, Experiment, experiments, get_experiment, register, select_experiments
from dcnet.experiments.status import CellStatus, status_of

__all__ = [
    "Cell",
    "CellStatus",
    "Experiment",
    "catalogue",
    "experiments",
    "get_experiment",
    "register",
    "select_experiments",
    "status_of",
]
