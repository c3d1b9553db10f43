"""Every table of the paper as a list of runs with the paper's numbers, what carries them out, and what is missing."""

from dcnet.experiments.experiment import Cell, Experiment, chosen, experiments, register
from dcnet.experiments.status import CellStatus, status_of

# Last, since a file of the catalogue may take the names above from here.
from dcnet.experiments import catalogue  # isort: skip

__all__ = ["Cell", "CellStatus", "Experiment", "catalogue", "chosen", "experiments", "register", "status_of"]
