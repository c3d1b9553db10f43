"""Compares training with and without fused blocks on a GPU: `python scripts/fused_training.py`.

Each operator is trained with several seeds, fused and module by module. The steps differ by rounding only, so the
errors and losses at the end may differ as much as those of two seeds. The last column has the p-value of Welch's t-test
on the errors: of a dozen operators, one below 0.05 is no surprise.
"""

import argparse
import functools
import itertools
import multiprocessing
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from scipy.stats import ttest_ind

from dcnet.training import Execution, Run, Trainer, recipe

OPERATORS = (
    "tanh-cos", "sphere-cos", "ball-sqcos", "linear-cos", "linear-sqcos", "seg-sqcos", "log-linear", "mix-cos",
    "tanh-sigmoid", "tanh-cos+linear",
)  # fmt: skip


class Job(NamedTuple):
    """One training run."""

    operator: str
    fused: bool
    seed: int


def train(job: Job, given: argparse.Namespace) -> tuple[float, float]:
    """Returns the test error in % and the last training loss."""
    settings = {"operator": job.operator, "seed": job.seed, "steps": given.steps, "evaluate_every": given.steps}
    config = recipe(given.recipe, model=given.model, **settings)
    unfused = mock.patch("dcnet.training.setup.fuse")
    with tempfile.TemporaryDirectory() as runs, nullcontext() if job.fused else unfused:
        record = Trainer(config, Run.of(config, Path(runs)), Execution()).run()
    return float(record.results.test_error), float(record.results.train_loss)


def summary(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operators", nargs="+", default=OPERATORS)
    parser.add_argument("--recipe", default="digits", help="a recipe of dcnet train, such as paper-cifar")
    parser.add_argument("--model", default="cnn9-small")
    parser.add_argument("--steps", type=int, default=1_000)
    parser.add_argument("--seeds", type=int, default=3, help="runs with and without fused blocks, 2 or more")
    parser.add_argument("--jobs", type=int, default=4, help="runs at the same time")
    given = parser.parse_args(words)
    if given.seeds < 2:
        parser.error(f"--seeds must be 2 or more, not {given.seeds}")
    jobs = [Job(*each) for each in itertools.product(given.operators, (True, False), range(given.seeds))]
    with multiprocessing.get_context("spawn").Pool(given.jobs) as pool:
        found = dict(zip(jobs, pool.map(functools.partial(train, given=given), jobs, chunksize=1), strict=True))
    print(f"{'operator':24} {'error, fused':16} {'not fused':16} {'loss, fused':16} {'not fused':16} p")
    for operator in given.operators:
        fused, other = ([found[Job(operator, on, seed)] for seed in range(given.seeds)] for on in (True, False))
        p = ttest_ind([error for error, _ in fused], [error for error, _ in other], equal_var=False).pvalue
        columns = [summary([each[i] for each in runs]) for i in (0, 1) for runs in (fused, other)]
        print(f"{operator:24} {' '.join(f'{column:16}' for column in columns)} {p:.2f}")


if __name__ == "__main__":
    main()
