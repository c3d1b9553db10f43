"""Times forward and backward of single layers and nn.Conv2d in turns, if their results are correct."""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dcnet.bench import correctness
from dcnet.bench.benchmark import Benchmark, Config, Group, Row, Steps
from dcnet.bench.correctness import placed, random_images
from dcnet.bench.meter import Meter, geometric_mean
from dcnet.bench.shapes import Shape, naive_conv2d
from dcnet.layers import DecoupledConv2d, conv2d
from dcnet.operator import PLAIN


@dataclass(frozen=True)
class Case:
    """A layer, or several layers in sequence, in one variant."""

    layer: nn.Module
    call: Callable[[Tensor], Tensor]


def make_case(variant: str, operator: str, shape: Shape, dtype: torch.dtype, device: str) -> Case:
    """The variant of the operator; its filters depend on the shape only."""
    layer = make_layer(PLAIN if variant == PLAIN else operator, shape, dtype, device)
    call: Callable[[Tensor], Tensor] = layer
    if variant.startswith("naive"):
        call = _naive(layer)
    if variant.endswith("compiled"):
        # Not dynamic, which would be slower; the check has another batch size than the timing.
        call = torch.compile(call, fullgraph=True, dynamic=False)
    return Case(layer, call)


def _naive(layer: nn.Conv2d) -> Callable[[Tensor], Tensor]:
    assert isinstance(layer, DecoupledConv2d)

    def call(x: Tensor) -> Tensor:
        return naive_conv2d(layer, x)

    return call


def make_layer(operator: str, shape: Shape, dtype: torch.dtype, device: str) -> nn.Conv2d:
    torch.manual_seed(0)
    sizes = (shape.channels, shape.channels, shape.kernel)
    layer = conv2d(*sizes, padding=shape.kernel // 2, bias=False, operator=operator)
    return placed(layer, device, dtype)


PASSES = ("forward", "training")
RATIOS = ("ratio", "host_ratio", "launches_ratio")


@dataclass(frozen=True, kw_only=True)
class LayerConfig(Config):
    """Each operator is timed in each variant on each shape; `check_batch=None` checks the whole batch."""

    shapes: list[str]
    variants: list[str]
    dtype: str
    check_batch: int | None = None


class LayerBenchmark(Benchmark[LayerConfig]):
    """A group per shape and operator: nn.Conv2d and the variants of the operator, in turns."""

    name = "layers"

    def __init__(self, config: LayerConfig, meter: Meter):
        super().__init__(config, meter, config.dtype, correctness.LAYER_TOLERANCES)

    @property
    def step_count(self) -> int:
        groups = len(self.config.shapes) * len(self.config.operators)
        return groups * (1 + len(self.config.variants) + len(PASSES) * self.rounds(self.meter.clocks))

    def prepare(self) -> dict[str, Any]:
        """Peak speeds of the device, and the lower bounds of the times for each shape."""
        ceilings = self.meter.ceilings(self.dtype)
        floors = {text: Shape.parse(text).floors(self.dtype.itemsize, ceilings) for text in self.config.shapes}
        return {**super().prepare(), "ceilings": asdict(ceilings), "floors_ms": floors}

    def measure(self, steps: Steps) -> Iterator[list[Row]]:
        for shape in self.config.shapes:
            for operator in self.config.operators:
                yield self._measure_group(Shape.parse(shape), operator, steps)
                self.meter.free()

    def summary(self, results: list[Row]) -> dict[str, Any]:
        return {"means": mean_rows(results)}

    def _measure_group(self, shape: Shape, operator: str, steps: Steps) -> list[Row]:
        # Layers of all groups share one code object, and torch.compile limits recompilations.
        torch._dynamo.reset()
        variants = (PLAIN, *self.config.variants)
        rows: dict[str, Row] = {name: {"shape": str(shape), "operator": operator, "variant": name} for name in variants}
        group = Group(self, PLAIN, rows, steps, f"{operator} at {shape}")
        x, gradient = (random_images(shape.images, self.meter.device, self.dtype, seed) for seed in (1, 2))
        references: dict[bool, correctness.Reference] = {}
        check = functools.partial(self._checked, shape, x[: self.config.check_batch], references)
        time_cases(group, group.make(check), x.requires_grad_(), gradient)
        return list(rows.values())

    def _checked(self, shape: Shape, x: Tensor, references: dict[bool, correctness.Reference], row: Row) -> Case:
        """The case of the row; stores its errors in the row, and whether they are too large."""
        case = make_case(row["variant"], row["operator"], shape, self.dtype, self.meter.device)
        plain = row["variant"] == PLAIN
        # All variants of an operator have the same filters and constants.
        if plain not in references:
            references[plain] = correctness.make_reference(case.layer, x)
        errors = references[plain].errors(case.layer, case.call)
        # The gradients of the naive formulation are inaccurate in half precision.
        self.note_errors(row, errors, ["output"] if row["variant"].startswith("naive") else None)
        return case


def time_cases(group: Group, cases: Mapping[str, Case], x: Tensor, gradient: Tensor) -> None:
    """Stores memory and times of both passes in the rows of the group."""
    forward = {name: functools.partial(case.call, x) for name, case in cases.items()}
    training = {name: functools.partial(run_training, case, x, gradient) for name, case in cases.items()}
    group.measure_memory(forward, training)
    group.time(forward, "forward")
    group.time(training, "training")


def run_training(case: Case, x: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    """Forward, and backward to the input and all parameters."""
    return torch.autograd.grad(case.call(x), [x, *case.layer.parameters()], gradient)


def mean_rows(results: list[Row]) -> list[Row]:
    """A row of means for each operator and variant."""
    names = dict.fromkeys((row["operator"], row["variant"]) for row in results)
    return [mean_row(*name, results) for name in names]


def mean_row(operator: str, variant: str, results: list[Row]) -> Row:
    """Geometric means of all ratios over the shapes; None if a shape was not timed."""
    rows = [row for row in results if (row["operator"], row["variant"]) == (operator, variant)]
    mean: Row = {"operator": operator, "variant": variant, "shapes": len(rows)}
    mean["memory_ratio"] = geometric_mean(row.get("memory_ratio") for row in rows)
    for entry in PASSES:
        ratios = [name for name in RATIOS if any(name in row.get(entry, {}) for row in rows)]
        mean[entry] = {name: geometric_mean(row.get(entry, {}).get(name) for row in rows) for name in ratios}
    return mean
