"""Results of contests: what is missing, tests against the best reference, and the verdict."""

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy.special import stdtr

from dcnet.experiments.contest import HELD_OUT, TEST, Contest, Side
from dcnet.experiments.experiment import Experiment
from dcnet.experiments.status import DIGITS, CellStatus

STAGES = ("trials", "second seeds", "finals")
# Differences with a larger probability count as chance.
SIGNIFICANT = 0.05
NO_VERDICT = (
    "No verdict: it needs a reference and a challenger, each with two final runs or more that all converged, and "
    "errors that vary between seeds."
)


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
        return " ".join([*found, *([self._advice()] if self.edges else [])])

    @property
    def results(self) -> "tuple[ContestState, ...]":
        """The results by each measure, the first one first."""
        return (self, *self.others)

    def _progress(self) -> str:
        """Returns a sentence about the missing runs."""
        stage = next(number for number, count in enumerate(self.missing) if count)
        counts = ", ".join(f"{count} {name}" for name, count in zip(STAGES, self.missing, strict=True) if count)
        return f"Stage {stage + 1} of {len(STAGES)} ({STAGES[stage]}) is open; missing runs: {counts}."

    def _advice(self) -> str:
        """Returns a sentence about the ranges to extend."""
        if len(self.edges) == 1:
            ((row, value),) = self.edges
            return f'The {value} of "{row}", the best recipe of its side, is at the edge of its range: extend it.'
        places = [(value, *reversed(row.split(": ", 1))) for row, value in self.edges]
        sides = Counter((value, recipe) for value, recipe, _ in places)
        found = [f'the {value} of "{recipe}" ({_sides(number)})' for (value, recipe), number in sides.items()]
        count = len({side for _, _, side in places})
        return f"The best recipes of {_sides(count)} are at the edge of their ranges, so extend: {', '.join(found)}."

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
    missing = _missing(rules, by_side, experiment.seeds)
    edges = tuple(edge for side in rules.sides for edge in _edges(rules, side, by_side[side.name]))
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


def _missing(rules: Contest, by_side: Mapping[str, Sequence[CellStatus]], default_seeds: int) -> tuple[int, int, int]:
    """Returns the number of missing runs of each stage, also of stages whose runs are not known yet."""
    finals = {name: _final(rules, statuses) for name, statuses in by_side.items()}
    seeds = next((final.seeds for final in finals.values() if final is not None), default_seeds)
    first = second = third = 0
    for side in rules.sides:
        trials = [one for one in by_side[side.name] if one.cell.column == HELD_OUT]
        final, untried = finals[side.name], sum(one.runs == 0 for one in trials)
        first += untried
        # Before all trials are done, the finalists are unknown.
        second += min(rules.finalists, len(trials)) if untried else sum(one.runs < one.seeds for one in trials)
        third += seeds - (0 if final is None else min(final.runs, seeds))
    return first, second, third


def _final(rules: Contest, statuses: Sequence[CellStatus]) -> CellStatus | None:
    """Returns the final runs of a side; None before its best recipe is known."""
    # Final runs from before the side got more recipes have a number of seeds.
    measured = (one for one in statuses if one.cell.column == rules.measures[0].name and one.cell.seeds is None)
    return next(measured, None)


def _edges(rules: Contest, side: Side, statuses: Sequence[CellStatus]) -> list[tuple[str, str]]:
    """Returns the row of the best recipe with each of its values at an edge."""
    final = _final(rules, statuses)
    best = [one for one in side.candidates if final is not None and final.cell.row == f"{side.name}: {one.name}"]
    return [(f"{side.name}: {one.name}", value) for one in best for value in side.edges(one)]


def _sides(count: int) -> str:
    return f"{count} side{'s' if count > 1 else ''}"


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
