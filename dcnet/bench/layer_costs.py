"""Times forward and backward of single layers and their plain twins in turns, if their results are correct."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dcnet.bench import correctness
from dcnet.bench.benchmark import Benchmark, Config, Deadline, Group, Row, Steps
from dcnet.bench.correctness import placed, random_images, random_values
from dcnet.bench.meter import Meter, geometric_mean
from dcnet.bench.naive import naive_output
from dcnet.bench.shapes import LayerShape, parse_shape
from dcnet.operator import PLAIN

PLAIN_COMPILED = f"{PLAIN}-compiled"


def base_of(variant: str) -> str:
    """The plain variant that a variant is compared with: a compiled one with the compiled plain layer."""
    return PLAIN_COMPILED if variant.endswith("compiled") else PLAIN


@dataclass(frozen=True)
class Case:
    """A layer, or several layers in sequence, in one variant."""

    layer: nn.Module
    call: Callable[..., Tensor]


def make_case(variant: str, operator: str, shape: LayerShape, dtype: torch.dtype, device: str) -> Case:
    """The variant of the operator; its filters depend on the shape only."""
    layer = make_layer(PLAIN if variant.startswith(PLAIN) else operator, shape, dtype, device)
    call: Callable[..., Tensor] = layer
    if variant.startswith("naive"):
        call = functools.partial(naive_output, layer)
    if variant.endswith("compiled"):
        # Not dynamic, which would be slower; the check has another batch size than the timing.
        call = torch.compile(call, fullgraph=True, dynamic=False)
    return Case(layer, call)


def make_layer(operator: str, shape: LayerShape, dtype: torch.dtype, device: str) -> Any:
    """The layer of the shape; only filters of images are channels last."""
    torch.manual_seed(0)
    layer = shape.make(operator)
    return placed(layer, device, dtype) if shape.channels_last else layer.to(device, dtype)


PASSES = ("forward", "training")
RATIOS = ("ratio", "host_ratio", "launches_ratio")


@dataclass(frozen=True, kw_only=True)
class LayerConfig(Config):
    """Each operator is timed in each variant on each shape; `check_batch=None` checks the whole batch.

    No group starts after `minutes`.
    """

    shapes: list[str]
    variants: list[str]
    dtype: str
    check_batch: int | None = None
    minutes: float | None = None


class LayerBenchmark(Benchmark[LayerConfig]):
    """A group per shape and operator: the plain layer of torch and the variants of the operator, in turns."""

    name = "layers"

    def __init__(self, config: LayerConfig, meter: Meter):
        super().__init__(config, meter, config.dtype, correctness.LAYER_TOLERANCES)
        self.deadline = Deadline(config.minutes)

    @property
    def variants(self) -> list[str]:
        """The timed variants: the plain layer, the compiled one if another variant is compiled, and all others."""
        plain = dict.fromkeys([PLAIN, *map(base_of, self.config.variants)])
        return [*plain, *self.config.variants]

    @property
    def step_count(self) -> int:
        supported = [parse_shape(text).obstacle(name) == "" for text, name in self._pairs()]
        return sum(supported) * (len(self.variants) + len(PASSES) * self.rounds(self.meter.clocks))

    def prepare(self) -> dict[str, Any]:
        """Peak speeds of the device, and the lower bounds of the times for each shape."""
        ceilings = self.meter.ceilings(self.dtype)
        floors = {text: parse_shape(text).floors(self.dtype.itemsize, ceilings) for text in self.config.shapes}
        return {**super().prepare(), "ceilings": asdict(ceilings), "floors_ms": floors}

    def measure(self, steps: Steps) -> Iterator[list[Row]]:
        for shape, operator in self._pairs():
            yield self._measure_group(parse_shape(shape), operator, steps)
            self.meter.free()

    def summary(self, results: list[Row]) -> dict[str, Any]:
        return {"means": mean_rows(results)}

    def _pairs(self) -> list[tuple[str, str]]:
        return [(shape, operator) for shape in self.config.shapes for operator in self.config.operators]

    def _measure_group(self, shape: LayerShape, operator: str, steps: Steps) -> list[Row]:
        # Layers of all groups share one code object, and torch.compile limits recompilations.
        torch._dynamo.reset()
        rows: dict[str, Row] = {
            name: {"shape": str(shape), "operator": operator, "variant": name} for name in self.variants
        }
        group = Group(self, {name: base_of(name) for name in rows}, rows, steps, f"{operator} at {shape}")
        if obstacle := shape.obstacle(operator):
            return group.skip(f"{operator} at {shape} is not supported: {obstacle}")
        if late := self.deadline.passed:
            return group.skip(f"{operator} at {shape} was not timed: {late}")
        group.attempt_all(functools.partial(self._measure_rows, shape, group))
        return list(rows.values())

    def _measure_rows(self, shape: LayerShape, group: Group) -> None:
        inputs, gradient = make_inputs(shape, self.meter.device, self.dtype)
        references: dict[bool, correctness.Reference] = {}
        few = {name: tensor[: self.config.check_batch] for name, tensor in inputs.items()}
        cases = group.make(functools.partial(self._checked, shape, few, references))
        # The expected results in float64 are large, and would count as memory of the layers.
        references.clear()
        time_cases(group, cases, [tensor.requires_grad_() for tensor in inputs.values()], gradient)

    def _checked(
        self,
        shape: LayerShape,
        inputs: Mapping[str, Tensor],
        references: dict[bool, correctness.Reference],
        row: Row,
    ) -> Case:
        """The case of the row; stores its errors in the row, and whether they are too large."""
        case = make_case(row["variant"], row["operator"], shape, self.dtype, self.meter.device)
        plain = row["variant"].startswith(PLAIN)
        # All variants of an operator have the same filters and constants.
        if plain not in references:
            references[plain] = correctness.make_reference(case.layer, inputs)
        errors = references[plain].errors(case.layer, case.call)
        # The gradients of the naive formulation are inaccurate in half precision.
        self.note_errors(row, errors, ["output"] if row["variant"].startswith("naive") else None)
        return case


def make_inputs(shape: LayerShape, device: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    """Random inputs of a layer by name, and a random gradient of its output."""
    make = random_images if shape.channels_last else random_values
    # The gradient has the seed 2, and a single input the seed 1.
    seeds = (1, *range(3, 2 + len(shape.inputs)))
    inputs = {
        name: make(size, device, dtype, seed) for (name, size), seed in zip(shape.inputs.items(), seeds, strict=True)
    }
    return inputs, make(shape.output, device, dtype, 2)


def time_cases(group: Group, cases: Mapping[str, Case], inputs: Sequence[Tensor], gradient: Tensor) -> None:
    """Stores memory and times of both passes in the rows of the group."""
    forward = {name: functools.partial(case.call, *inputs) for name, case in cases.items()}
    training = {name: functools.partial(run_training, case, inputs, gradient) for name, case in cases.items()}
    group.measure_memory(forward, training)
    group.time(forward, "forward")
    group.time(training, "training")


def run_training(case: Case, inputs: Sequence[Tensor], gradient: Tensor) -> tuple[Tensor, ...]:
    """Forward, and backward to the inputs and all parameters."""
    return torch.autograd.grad(case.call(*inputs), [*inputs, *case.layer.parameters()], gradient)


def mean_rows(results: list[Row]) -> list[Row]:
    """A row of means for each operator and variant."""
    names = dict.fromkeys((row["operator"], row["variant"]) for row in results)
    return [mean_row(*name, results) for name in names]


def mean_row(operator: str, variant: str, results: list[Row]) -> Row:
    """Geometric means of all ratios over the shapes; None if a supported shape was not timed."""
    named = [row for row in results if (row["operator"], row["variant"]) == (operator, variant)]
    rows = [row for row in named if not row.get("skipped")]
    mean: Row = {"operator": operator, "variant": variant, "shapes": len(rows)}
    mean["memory_ratio"] = geometric_mean(row.get("memory_ratio") for row in rows)
    for entry in PASSES:
        ratios = [name for name in RATIOS if any(name in row.get(entry, {}) for row in rows)]
        mean[entry] = {name: geometric_mean(row.get(entry, {}).get(name) for row in rows) for name in ratios}
    return mean
