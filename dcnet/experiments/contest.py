"""Contests: each side chooses the best of its recipes on held-out images, and the best ones compete on the test set.

A side runs in three stages: one trial per recipe, a second seed for the best trials, and final runs of the best recipe.
Every choice is a function of the records, so a contest can be interrupted and resumed at any point."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scipy.special import stdtr

from dcnet.experiments.experiment import ERROR, Cell, Experiment, Find
from dcnet.experiments.status import DIGITS, CellStatus
from dcnet.training import RunConfig

HELD_OUT, TEST = "held-out error", "test error"
# The swept fields of a config, with their names in messages.
SWEPT = {"lr": "rate", "weight_decay": "decay"}
STAGES = ("trials", "second seeds", "finals")
# The seeds of a trial that reached the second stage.
TRIAL_SEEDS = 2
# Differences with a larger probability count as chance.
SIGNIFICANT = 0.05
NO_VERDICT = (
    "No verdict: it needs a reference and a challenger, each with two final runs or more that all converged, and "
    "errors that vary between seeds."
)


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
        finalists = self._finalists(side, find)
        cells = [
            Cell(
                f"{side.name}: {one.name}",
                HELD_OUT,
                self.trial_config(one),
                seeds=TRIAL_SEEDS if one in finalists else 1,
            )
            for one in side.candidates
        ]
        best = self._best(finalists, find)
        if best is None:
            return cells
        return [*cells, *(self._final_cell(f"{side.name}: {best.name}", best, one) for one in self.measures)]

    @staticmethod
    def _final_cell(row: str, best: Candidate, one: Measure) -> Cell:
        # Other seeds than those of the trials, which the recipe was chosen by.
        return Cell(row, one.name, best.config, None, one.metric, one.factor, TRIAL_SEEDS, one.evaluation)

    def _finalists(self, side: Side, find: Find) -> list[Candidate]:
        """Returns the candidates with the lowest errors of the first seed; none if a trial is missing."""
        ranked = self._ranked(side.candidates, range(1), find)
        return ranked[: self.finalists]

    def _best(self, finalists: Sequence[Candidate], find: Find) -> Candidate | None:
        """Returns the finalist with the lowest mean error over its seeds; None if a run is missing."""
        ranked = self._ranked(finalists, range(TRIAL_SEEDS), find)
        return ranked[0] if ranked else None

    def _ranked(self, candidates: Sequence[Candidate], seeds: range, find: Find) -> list[Candidate]:
        """Sorts candidates by their mean held-out error; returns an empty list if a run is missing.

        Of two candidates with the same error, the one listed first comes first.
        """
        errors = []
        for one in candidates:
            cell = Cell(one.name, HELD_OUT, self.trial_config(one))
            records = [find(config) for config in cell.configs(len(seeds))]
            found = [record for record in records if record is not None]
            if len(found) < len(seeds):
                return []
            # The record of a run that diverged has the error of its last evaluation, which does not count.
            values = [cell.value(record) if record.status == "done" else None for record in found]
            errors.append(math.fsum(math.inf if value is None else value for value in values))
        order = sorted(range(len(candidates)), key=lambda place: (errors[place], place))
        return [candidates[place] for place in order]


def contest_experiment(
    name: str, title: str, rules: Contest, seeds: int = 3, notes: tuple[str, ...] = ()
) -> Experiment:
    """Returns a contest as an experiment, with the trials as its first cells."""
    if len(rules.sides) < 2 or not any(side.reference for side in rules.sides):
        raise ValueError(f"the contest {name!r} needs two sides or more, and a reference among them")
    order = (HELD_OUT, *(one.name for one in rules.measures))
    return Experiment(name, title, rules.cells(lambda config: None), order, seeds, rules=rules, notes=notes)


@dataclass(frozen=True)
class Standing:
    """The final result of a side.

    Attributes:
        recipe: the name of its best recipe.
        errors: errors of the final runs that converged, in %.
        diverged: number of final runs that did not converge.
        seconds: mean training time of a final run.
        all_seconds: training time of all runs of the side, with its trials and with runs that diverged.
        p: probability of such a difference from the reference by chance, by Welch's t-test and Holm's correction for
            the number of challengers; None for references, and if it cannot be computed.
    """

    side: str
    recipe: str
    errors: tuple[float, ...]
    diverged: int
    seconds: float
    all_seconds: float
    p: float | None = None

    @property
    def rank(self) -> tuple[bool, float]:
        """Sorts sides: those with a run that did not converge come last."""
        return self.diverged > 0, self.mean

    @property
    def mean(self) -> float:
        return statistics.fmean(self.errors) if self.errors else math.inf

    @property
    def deviation(self) -> float | None:
        # It is exactly 0 for equal errors, unlike that of a rounded mean.
        return statistics.stdev(self.errors) if len(self.errors) > 1 else None


def welch_p(first: Standing, second: Standing) -> float | None:
    """Returns the two-sided p-value of Welch's t-test.

    None if a run diverged, a side has fewer than two runs, or different errors do not vary on either side: then the
    seeds had no effect, or there are too few of them to estimate the deviation.
    """
    if first.deviation is None or second.deviation is None or first.diverged or second.diverged:
        return None
    shares = [one.deviation**2 / len(one.errors) for one in (first, second) if one.deviation is not None]
    difference, variance = first.mean - second.mean, sum(shares)
    if variance == 0:
        return 1.0 if difference == 0 else None
    freedom = variance**2 / sum(
        share**2 / (len(one.errors) - 1) for share, one in zip(shares, (first, second), strict=True)
    )
    return float(2 * stdtr(freedom, -abs(difference) / math.sqrt(variance)))


def holm(values: Sequence[float | None], tests: int) -> list[float | None]:
    """Returns p-values corrected for the number of tests by Holm's method, in the given order.

    None stays None, and it and values that are not given count like a p-value of 1.
    """
    known = sorted((value, place) for place, value in enumerate(values) if value is not None)
    corrected: list[float | None] = [None] * len(values)
    largest = 0.0
    for rank, (value, place) in enumerate(known):
        largest = max(largest, min(1.0, (tests - rank) * value))
        corrected[place] = largest
    return corrected


@dataclass(frozen=True)
class ContestState:
    """How far a contest is, and its result.

    Attributes:
        missing: number of missing runs by stage.
        edges: best recipes that have a value at the edge of its range, with the name of the value.
        standings: the sides by test error, once all runs are done; the lowest error first.
        reference: the reference side with the lowest test error; None if the contest is unfinished or has none.
        measure: the name of the measure that `standings` are sorted by.
        others: the results by the other measures of the contest.
    """

    missing: tuple[int, int, int]
    edges: tuple[tuple[str, str], ...]
    standings: tuple[Standing, ...]
    reference: str | None
    measure: str = TEST
    others: "tuple[ContestState, ...]" = ()

    def __str__(self) -> str:
        by = [f"By {one.measure}: " if self.others else "" for one in self.results]
        verdicts = [f"{prefix}{one.verdict}" for prefix, one in zip(by, self.results, strict=True)]
        found = [self._progress()] if any(self.missing) else verdicts
        return " ".join([*found, *(self._edge(value) for value in dict.fromkeys(value for _, value in self.edges))])

    @property
    def results(self) -> "tuple[ContestState, ...]":
        """The results by each measure, the first one first."""
        return (self, *self.others)

    def _progress(self) -> str:
        """Returns a sentence about the missing runs."""
        stage = next(number for number, count in enumerate(self.missing) if count)
        counts = ", ".join(f"{count} {name}" for name, count in zip(STAGES, self.missing, strict=True) if count)
        return f"Stage {stage + 1} of {len(STAGES)} ({STAGES[stage]}) is open; missing runs: {counts}."

    def _edge(self, value: str) -> str:
        """Returns a sentence about the best recipes that have this value at the edge of its range."""
        recipes = "; ".join(recipe for recipe, other in self.edges if other == value)
        return f"Best recipes whose {value} is at the edge of its range, so extend the range: {recipes}."

    @property
    def verdict(self) -> str:
        """One sentence: who wins, by how much and at what cost."""
        reference = next((one for one in self.standings if one.side == self.reference), None)
        rival = None if reference is None else self._rival(reference)
        if reference is None or rival is None or rival.p is None:
            return NO_VERDICT
        best, other = (rival, reference) if rival.mean < reference.mean else (reference, rival)
        by = f"{abs(round(best.mean, DIGITS) - round(other.mean, DIGITS)):.{DIGITS}f}"
        means = f"{best.mean:.{DIGITS}f} against {other.mean:.{DIGITS}f} %"
        test = f"Welch's t-test with Holm's correction: p = {rival.p:.2g}"
        if rival.p >= SIGNIFICANT:
            return f'No difference beyond chance: "{best.side}" is ahead of "{other.side}" by {by} ({means}; {test}).'
        known = best.seconds and other.seconds
        cost = f"at {best.seconds / other.seconds:.2f} times its training time" if known else "at unknown cost"
        return f'"{best.side}" wins: ahead of "{other.side}" by {by} ({means}; {test}), {cost}.'

    def _rival(self, reference: Standing) -> Standing | None:
        """Returns the best challenger that differs from the reference beyond chance if any is ahead, else the best."""
        tested = [one for one in self.standings if one.p is not None]
        winners = [one for one in tested if one.mean < reference.mean and (one.p or 0.0) < SIGNIFICANT]
        return next(iter(winners or tested), None)

    def to_json(self) -> dict[str, Any]:
        sides = [
            {**vars(one), "mean": one.mean if one.errors else None, "deviation": one.deviation}
            for one in self.standings
        ]
        others = [one.to_json() for one in self.others]
        return {**vars(self), "standings": sides, "stages": list(STAGES), "verdict": self.verdict, "others": others}


def find_contest(experiment: Experiment, statuses: Sequence[CellStatus]) -> ContestState | None:
    """Returns the state of a contest from the status of its cells; None for other experiments."""
    rules = experiment.rules
    if not isinstance(rules, Contest):
        return None
    by_side = {
        side.name: [one for one in statuses if one.cell.row.startswith(f"{side.name}: ")] for side in rules.sides
    }
    missing = _missing(rules, statuses, experiment.seeds)
    edges = tuple(edge for side in rules.sides for edge in _edges(side, by_side[side.name]))
    if any(missing):
        return ContestState(missing, edges, (), None)
    first, *others = (_result(rules, by_side, measure.name) for measure in rules.measures)
    return dataclasses.replace(first, edges=edges, others=tuple(others))


def _result(rules: Contest, by_side: Mapping[str, Sequence[CellStatus]], measure: str) -> ContestState:
    """Returns the result of a finished contest by one measure."""
    standings = sorted((_standing(name, found, measure) for name, found in by_side.items()), key=lambda one: one.rank)
    known = {side.name for side in rules.sides if side.reference}
    reference = next((one for one in standings if one.side in known), None)
    named = None if reference is None else reference.side
    ranked = _with_p(standings, reference, known, rules.competitors())
    return ContestState((0, 0, 0), (), ranked, named, measure)


def _missing(rules: Contest, statuses: Sequence[CellStatus], seeds: int) -> tuple[int, int, int]:
    """Returns the number of missing runs of each stage, also of stages whose runs are not known yet."""
    columns = (HELD_OUT, rules.measures[0].name)
    trials, finals = ([one for one in statuses if one.cell.column == column] for column in columns)
    done = (
        sum(one.runs > 0 for one in trials),
        sum(one.runs >= TRIAL_SEEDS for one in trials if one.seeds == TRIAL_SEEDS),
        sum(min(one.runs, one.seeds) for one in finals),
    )
    first, second, third = rules.stage_sizes(next((one.seeds for one in finals), seeds))
    return first - done[0], second - done[1], third - done[2]


def _edges(side: Side, statuses: Sequence[CellStatus]) -> list[tuple[str, str]]:
    rows = {f"{side.name}: {one.name}": one for one in side.candidates}
    best = {one.cell.row: None for one in statuses if one.cell.column != HELD_OUT}
    return [(row, value) for row in best for value in side.edges(rows[row])]


def _standing(side: str, statuses: Sequence[CellStatus], measure: str) -> Standing:
    (final,) = (one for one in statuses if one.cell.column == measure)
    seconds = math.fsum(final.seconds) / max(1, len(final.seconds))
    # All measures have the same final runs.
    total = math.fsum(one.all_seconds for one in statuses if one.cell.column in (HELD_OUT, measure))
    recipe = final.cell.row.removeprefix(f"{side}: ")
    return Standing(side, recipe, final.values, final.diverged, seconds, total)


def _with_p(
    standings: Sequence[Standing], reference: Standing | None, known: set[str], competitors: tuple[int, int]
) -> tuple[Standing, ...]:
    """Adds the p-values of the challengers, which are compared with the best reference.

    It is the best one by its test error, which makes it hard for a challenger to be ahead, but easy to be behind: then
    the p-value is multiplied by the number of references.
    """
    if reference is None:
        return tuple(standings)
    references, challengers = competitors
    others = [one for one in standings if one.side not in known]
    values = [welch_p(one, reference) for one in others]
    factors = [references if one.mean > reference.mean else 1 for one in others]
    chances = [None if p is None else p * factor for p, factor in zip(values, factors, strict=True)]
    by_side = dict(zip((one.side for one in others), holm(chances, challengers), strict=True))
    return tuple(dataclasses.replace(one, p=by_side.get(one.side)) for one in standings)
