"""Forward and backward of single layers against nn.Conv2d, in turns, and only if their results are right."""

import functools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dcnet.bench import check
from dcnet.bench.benchmark import Benchmark, Config, Row, Steps
from dcnet.bench.group import Group
from dcnet.bench.images import random_images
from dcnet.bench.meter import Meter
from dcnet.bench.shapes import Shape
from dcnet.bench.timing import geometric_mean
from dcnet.bench.variants import Case, make_case
from dcnet.operator import PLAIN

PASSES = ("forward", "training")
RATIOS = ("ratio", "host_ratio", "launches_ratio")


@dataclass(frozen=True, kw_only=True)
class LayerConfig(Config):
    """What is timed: each operator in each variant on each shape; None checks the whole batch."""

    shapes: list[str]
    variants: list[str]
    dtype: str
    check_batch: int | None = None


class LayerBenchmark(Benchmark):
    """One group for each shape and operator: nn.Conv2d and the variants of the operator, in turns."""

    name = "layers"

    def __init__(self, config: LayerConfig, meter: Meter):
        super().__init__(config, meter)
        self.layers = config
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.tolerance = check.LAYER_TOLERANCES[self.dtype]
        if self.dtype == torch.float32:
            # In TF32 torch's own convolution has three digits, and the check asks for four.
            torch.backends.cudnn.allow_tf32 = False

    @property
    def step_count(self) -> int:
        groups = len(self.layers.shapes) * len(self.layers.operators)
        return groups * (1 + len(self.layers.variants) + len(PASSES) * self.rounds(self.meter.clocks))

    def prepare(self) -> dict[str, Any]:
        """The ceilings of the device, and the floors that they set for the shapes."""
        ceilings = self.meter.ceilings(self.dtype)
        floors = {text: Shape.parse(text).floors(self.dtype.itemsize, ceilings) for text in self.layers.shapes}
        return {"tolerance": self.tolerance, "ceilings": asdict(ceilings), "floors_ms": floors}

    def measure(self, steps: Steps) -> Iterator[list[Row]]:
        for shape in self.layers.shapes:
            for operator in self.layers.operators:
                yield self._measure_group(Shape.parse(shape), operator, steps)
                self.meter.free()

    def summary(self, results: list[Row]) -> dict[str, Any]:
        names = dict.fromkeys((row["operator"], row["variant"]) for row in results)
        return {"means": [mean_row(*name, results) for name in names]}

    def _measure_group(self, shape: Shape, operator: str, steps: Steps) -> list[Row]:
        # torch compiles a function a few times only, and takes the layers of all groups for one function.
        torch._dynamo.reset()
        variants = (PLAIN, *self.layers.variants)
        rows: dict[str, Row] = {name: {"shape": str(shape), "operator": operator, "variant": name} for name in variants}
        group = Group(self, PLAIN, rows, steps)
        x, gradient = (random_images(shape.images, self.meter.device, self.dtype, seed) for seed in (1, 2))
        cases = self._check_all(group, shape, x)
        steps.say(f"{operator} at {shape}: timing")
        self._time(group, cases, x.requires_grad_(), gradient)
        return list(rows.values())

    def _check_all(self, group: Group, shape: Shape, x: Tensor) -> dict[str, Case]:
        """The cases of all rows that can be run; those that are wrong are noted as such."""
        cases: dict[str, Case] = {}
        references: dict[bool, check.Reference] = {}
        for name, row in group.rows.items():
            group.steps.say(f"{row['operator']} at {shape}: {name}")
            work = functools.partial(self._checked, row, shape, x[: self.layers.check_batch], references)
            case = group.attempt(name, work)
            cases.update({} if case is None else {name: case})
            group.steps.advance()
        return cases

    def _checked(self, row: Row, shape: Shape, x: Tensor, references: dict[bool, check.Reference]) -> Case:
        """The case of the row, in which its errors are noted, and whether they are too large."""
        case = make_case(row["variant"], row["operator"], shape, self.dtype, self.meter.device)
        plain = row["variant"] == PLAIN
        # All variants of an operator have the same filters and constants, and so the same results.
        if plain not in references:
            references[plain] = check.make_reference(case.layer, x)
        errors = references[plain].errors(case.layer, case.call)
        judged = errors if case.judged_by_gradients else {"output": errors["output"]}
        row.update(errors=check.finite(errors), wrong=check.worst(judged, self.tolerance))
        return case

    def _time(self, group: Group, cases: dict[str, Case], x: Tensor, gradient: Tensor) -> None:
        forward = {name: functools.partial(case.call, x) for name, case in cases.items()}
        training = {name: functools.partial(run_training, case, x, gradient) for name, case in cases.items()}
        group.weigh(forward, training)
        group.time(forward, "forward")
        group.time(training, "training")


def run_training(case: Case, x: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    """Forward, and backward to the input and all parameters."""
    return torch.autograd.grad(case.call(x), [x, *case.layer.parameters()], gradient)


def mean_row(operator: str, variant: str, results: list[Row]) -> Row:
    """The geometric means over the shapes of every ratio; None where one of the shapes could not be timed."""
    rows = [row for row in results if (row["operator"], row["variant"]) == (operator, variant)]
    mean: Row = {"operator": operator, "variant": variant, "shapes": len(rows)}
    mean["memory_ratio"] = geometric_mean(row.get("memory_ratio") for row in rows)
    for entry in PASSES:
        ratios = [name for name in RATIOS if any(name in row.get(entry, {}) for row in rows)]
        mean[entry] = {name: geometric_mean(row.get(entry, {}).get(name) for row in rows) for name in ratios}
    return mean
