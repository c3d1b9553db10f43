"""Contests: each side chooses the best of its recipes on held-out images, and the best ones compete on the test set.

A side runs in three stages: one trial per recipe, a second seed for the best trials, and final runs of the best recipe.
Every choice is a function of the records, so a contest can be interrupted and resumed at any point."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import Any

from dcnet.experiments.experiment import ERROR, Cell, Experiment, Find
from dcnet.training import RunConfig

HELD_OUT, TEST = "held-out error", "test error"
# The swept fields of a config, with their names in messages.
SWEPT = {"lr": "rate", "weight_decay": "decay"}
# The seeds of a trial that reached the second stage.
TRIAL_SEEDS = 2


@dataclass(frozen=True)
class Measure:
    """A number of the final runs by which the sides compete; smaller is better.

    Attributes:
        name: the name of its column.
        metric: see `Cell`.
        factor: see `Cell`.
        evaluation: see `Cell`.
    """

    name: str = TEST
    metric: tuple[str | int, ...] = ERROR
    factor: float = 1.0
    evaluation: str | None = None


@dataclass(frozen=True)
class Candidate:
    """A recipe of a side: the config of its final runs, and the family whose rates and decays form a range."""

    family: str
    config: RunConfig

    @property
    def name(self) -> str:
        return f"{self.family} {self.config.lr:g}, decay {self.config.weight_decay:g}"


@dataclass(frozen=True)
class Side:
    """A side of a contest; a reference is what a practitioner would use today, and the others challenge it."""

    name: str
    candidates: tuple[Candidate, ...]
    reference: bool = False

    def edges(self, best: Candidate) -> list[str]:
        """Returns the names of the swept values that are the smallest or the largest one tried by their family.

        A decay of 0 is no edge, since there is no smaller one.
        """
        family = [one.config for one in self.candidates if one.family == best.family]
        found = []
        for name, shown in SWEPT.items():
            value, tried = getattr(best.config, name), sorted({getattr(config, name) for config in family})
            if len(tried) > 1 and value in (tried[0], tried[-1]) and value != 0:
                found.append(shown)
        return found


@dataclass(frozen=True)
class Contest:
    """The rules of a contest.

    Attributes:
        sides: the sides, with the same number of recipes each.
        trial: the fields of the config that differ in trials. In a fair contest, one is a dataset with held-out
            training images: otherwise the trials choose recipes by the test set.
        finalists: number of recipes of each side with a second seed.
        measures: what is measured in the final runs; the sides are sorted by the first one.
        whole: the contest that this one has some sides of; p-values are corrected for all of its sides.
    """

    sides: tuple[Side, ...]
    trial: Mapping[str, Any] = field(default_factory=dict)
    finalists: int = 4
    measures: tuple[Measure, ...] = (Measure(),)
    whole: "Contest | None" = None

    def __post_init__(self) -> None:
        counts = {side.name: len(side.candidates) for side in self.sides}
        for side in self.sides:
            self._check_side(side)
        if len(set(counts.values())) > 1:
            raise ValueError(f"all sides of a contest need the same number of recipes, but they have {counts}")
        if self.finalists < 1:
            raise ValueError(f"finalists must be 1 or more, not {self.finalists}")

    @staticmethod
    def _check_side(side: Side) -> None:
        # Rows are named "side: recipe".
        if ": " in side.name:
            raise ValueError(f"the name of a side must not contain ': ', as {side.name!r} does: use a comma")
        configs = [one.config for one in side.candidates]
        if twice := next((one for one in side.candidates if configs.count(one.config) > 1), None):
            raise ValueError(f"the side {side.name!r} has the config of {twice.name!r} twice: give different recipes")

    def cells(self, find: Find) -> tuple[Cell, ...]:
        """Returns the cells of the stages that the records have reached: trials, and the final runs of each side."""
        return tuple(cell for side in self.sides for cell in self._side_cells(side, find))

    def choices(self) -> list[str]:
        """Returns the names of the sides."""
        return [side.name for side in self.sides]

    def only(self, prefixes: tuple[str, ...]) -> "Contest":
        """Returns the contest between the sides whose names start with one of the prefixes."""
        few = tuple(side for side in self.sides if side.name.startswith(prefixes))
        return dataclasses.replace(self, sides=few, whole=self.whole or self)

    def small(self, change: Callable[[RunConfig], RunConfig]) -> "Contest":
        """Returns a contest with one recipe per family and changed configs, for smoke tests."""
        sides = []
        for side in self.sides:
            first = {one.family: one for one in reversed(side.candidates)}
            few = [dataclasses.replace(one, config=change(one.config)) for one in reversed(first.values())]
            sides.append(dataclasses.replace(side, candidates=tuple(few)))
        return Contest(tuple(sides), finalists=1, measures=self.measures)

    def runs(self, seeds: int) -> int:
        """Returns the number of runs of all stages."""
        return sum(self.stage_sizes(seeds))

    def stage_sizes(self, seeds: int) -> tuple[int, int, int]:
        """Returns the number of runs of each stage."""
        recipes = sum(len(side.candidates) for side in self.sides)
        second = sum(min(self.finalists, len(side.candidates)) for side in self.sides)
        return recipes, second, seeds * len(self.sides)

    def competitors(self) -> tuple[int, int]:
        """Returns the number of references and of challengers, also of sides that `only` left out."""
        sides = (self.whole or self).sides
        references = sum(side.reference for side in sides)
        return references, len(sides) - references

    def trial_config(self, candidate: Candidate) -> RunConfig:
        return dataclasses.replace(candidate.config, **self.trial)

    def _side_cells(self, side: Side, find: Find) -> list[Cell]:
        finalists = self._ranked(side.candidates, 1, find)[: self.finalists]
        trials = [self._trial_cell(side, one, one in finalists, find) for one in side.candidates]
        ranked = self._ranked(finalists, TRIAL_SEEDS, find)
        if not ranked:
            return trials + self._earlier_finals(side, find)
        return trials + [self._final_cell(side, ranked[0], one) for one in self.measures]

    def _trial_cell(self, side: Side, one: Candidate, finalist: bool, find: Find) -> Cell:
        """Returns the cell of a trial, with its second seed if it is a finalist or was one before more recipes came."""
        config = self.trial_config(one)
        second = finalist or find(dataclasses.replace(config, seed=TRIAL_SEEDS - 1)) is not None
        return Cell(f"{side.name}: {one.name}", HELD_OUT, config, seeds=TRIAL_SEEDS if second else 1)

    @staticmethod
    def _final_cell(side: Side, best: Candidate, one: Measure) -> Cell:
        row = f"{side.name}: {best.name}"
        # Other seeds than those of the trials, which the recipe was chosen by.
        return Cell(row, one.name, best.config, None, one.metric, one.factor, TRIAL_SEEDS, one.evaluation)

    def _earlier_finals(self, side: Side, find: Find) -> list[Cell]:
        """Returns the cells of final runs from before the side got more recipes; only these have a number of seeds.

        They are shown until the best recipe is known again, but are no part of the result.
        """
        cells = [self._final_cell(side, one, measure) for one in side.candidates for measure in self.measures]
        known = [(cell, _known_seeds(cell, find)) for cell in cells]
        return [dataclasses.replace(cell, seeds=seeds) for cell, seeds in known if seeds]

    def _ranked(self, candidates: Sequence[Candidate], seeds: int, find: Find) -> list[Candidate]:
        """Sorts candidates by their mean held-out error over the first seeds; returns [] if a run is missing.

        Of two candidates with the same error, the one listed first comes first.
        """
        errors = []
        for one in candidates:
            cell = Cell(one.name, HELD_OUT, self.trial_config(one))
            records = [find(config) for config in cell.configs(seeds)]
            found = [record for record in records if record is not None]
            if len(found) < seeds:
                return []
            # The record of a run that diverged has the error of its last evaluation, which does not count.
            values = [cell.value(record) if record.status == "done" else None for record in found]
            errors.append(math.fsum(math.inf if value is None else value for value in values))
        return [candidates[place] for place in sorted(range(len(candidates)), key=errors.__getitem__)]


def contest_experiment(
    name: str, title: str, rules: Contest, seeds: int = 3, notes: tuple[str, ...] = ()
) -> Experiment:
    """Returns a contest as an experiment, with the trials as its first cells."""
    if len(rules.sides) < 2 or not any(side.reference for side in rules.sides):
        raise ValueError(f"the contest {name!r} needs two sides or more, and a reference among them")
    order = (HELD_OUT, *(one.name for one in rules.measures))
    return Experiment(name, title, rules.cells(lambda config: None), order, seeds, rules=rules, notes=notes)


def _known_seeds(cell: Cell, find: Find) -> int:
    """Returns how many seeds, from the first one on, have a number for the cell."""
    seeds = (dataclasses.replace(cell, first_seed=seed) for seed in count(cell.first_seed))
    records = (find(config) for one in seeds for config in one.configs(1))
    return sum(1 for _ in takewhile(lambda record: record is not None and cell.value(record) is not None, records))
