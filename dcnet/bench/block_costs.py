"""Times blocks of convolution, batch normalization and ReLU in turns: plain and decoupled, compiled and fused."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dcnet import kernels
from dcnet.bench import correctness
from dcnet.bench.benchmark import Benchmark, Config, Group, Row, Steps
from dcnet.bench.correctness import placed, random_images
from dcnet.bench.layer_costs import PASSES, Case, mean_rows, time_cases
from dcnet.bench.meter import Meter
from dcnet.bench.shapes import Shape
from dcnet.fuse import fuse, fusion_report
from dcnet.layers import conv2d
from dcnet.operator import PLAIN

BASE = "plain-compiled"
# Each variant, with the one that runs the same modules in eager mode.
VARIANTS = {"plain": "plain", BASE: "plain", "unfused": "unfused", "unfused-compiled": "unfused", "fused": "unfused"}

# Gradients of a compiled or fused variant may have this many times the error of the same modules in eager mode.
MOST_ERROR = 1.5
# The ends of the names of gradients that are not of constants.
DIRECT = (" x", ".weight", ".bias")
# So many ReLUs may be on the other side of their kink in any precision.
FLIPS = 10


def make_blocks(operator: str, count: int, shape: Shape, dtype: torch.dtype, device: str) -> nn.Sequential:
    """Blocks of convolution, batch normalization in float32 and ReLU; filters depend on shape and count only."""
    torch.manual_seed(0)
    model = nn.Sequential()
    for i in range(1, count + 1):
        sizes = (shape.channels, shape.channels, shape.kernel)
        layer = conv2d(*sizes, padding=shape.kernel // 2, groups=shape.groups, bias=False, operator=operator)
        norm = nn.BatchNorm2d(shape.channels)
        for name, module in {f"conv{i}": layer, f"norm{i}": norm, f"relu{i}": nn.ReLU()}.items():
            model.add_module(name, module)
    model = placed(model, device, dtype)
    for module in model:
        if isinstance(module, nn.BatchNorm2d):
            module.float()
    return model


def make_case(variant: str, operator: str, count: int, shape: Shape, dtype: torch.dtype, device: str) -> Case:
    """The blocks of the operator, or plain ones, in this variant."""
    model = make_blocks(PLAIN if VARIANTS[variant] == "plain" else operator, count, shape, dtype, device)
    if variant == "fused":
        fuse(model)
    call: Callable[..., Tensor] = model
    if variant.endswith("compiled"):
        call = torch.compile(model, fullgraph=True, dynamic=False)
    return Case(model, call)


@dataclass(frozen=True)
class Limits:
    """The largest accepted errors of a series of blocks.

    A ReLU whose input has the other sign than in float64 has a completely wrong gradient. If outputs have relative
    errors of size e, about a share e of the ReLUs is wrong, and gradients have errors of about sqrt(e). So the limit of
    gradients is sqrt(blocks * tolerance of a layer). A compiled or fused variant must also be about as accurate as the
    same modules in eager mode. This does not apply to constants: batch normalization removes the scale of its input,
    which nearly cancels their gradients, so that the ratio of two errors is noise.
    """

    output: float
    gradient: float
    least: float

    @classmethod
    def of(cls, shape: Shape, count: int, dtype: torch.dtype) -> "Limits":
        output = correctness.NETWORK_TOLERANCES[dtype]
        few = math.sqrt(FLIPS / math.prod(shape.images))
        gradient = math.sqrt(count * correctness.LAYER_TOLERANCES[dtype])
        return cls(output, max(gradient, few), max(output, few))

    def of_errors(self, errors: Mapping[str, float], eager: Mapping[str, float]) -> dict[str, float]:
        """The limit of each error; `eager` has the errors in eager mode if this is another variant."""
        limits = dict.fromkeys(errors, self.gradient)
        for name in [name for name in errors if name in eager and name.endswith(DIRECT)]:
            limits[name] = min(self.gradient, max(self.least, MOST_ERROR * eager[name]))
        return {**limits, "output": self.output}


@dataclass(frozen=True, kw_only=True)
class BlockConfig(Config):
    """Blocks of each operator are timed in all variants on each shape; `check_batch=None` checks the whole batch."""

    shapes: list[str]
    blocks: int
    dtype: str
    check_batch: int | None = None


class BlockBenchmark(Benchmark[BlockConfig]):
    """A group per shape and operator: all variants, in turns; the base is the compiled plain one."""

    name = "blocks"

    def __init__(self, config: BlockConfig, meter: Meter):
        super().__init__(config, meter, config.dtype, correctness.NETWORK_TOLERANCES)

    @property
    def step_count(self) -> int:
        groups = len(self.config.shapes) * len(self.config.operators)
        return groups * (len(VARIANTS) + len(PASSES) * self.rounds(self.meter.clocks))

    def measure(self, steps: Steps) -> Iterator[list[Row]]:
        for shape in self.config.shapes:
            for operator in self.config.operators:
                yield self._measure_group(Shape.parse(shape), operator, steps)
                self.meter.free()

    def summary(self, results: list[Row]) -> dict[str, Any]:
        return {"means": mean_rows(results)}

    def _measure_group(self, shape: Shape, operator: str, steps: Steps) -> list[Row]:
        torch._dynamo.reset()
        rows: dict[str, Row] = {name: {"shape": str(shape), "operator": operator, "variant": name} for name in VARIANTS}
        group = Group(self, BASE, rows, steps, f"{operator} at {shape}")
        x, gradient = (random_images(shape.images, self.meter.device, self.dtype, seed) for seed in (1, 2))
        check = Check(x[: self.config.check_batch], Limits.of(shape, self.config.blocks, self.dtype))
        cases = group.make(functools.partial(self._checked, shape, check))
        # The expected results in float64 are large.
        check.references.clear()
        # The memory of the base comes first, since all others are divided by it.
        in_order = dict(sorted(cases.items(), key=lambda item: item[0] != BASE))
        time_cases(group, in_order, [x.requires_grad_()], gradient)
        return list(rows.values())

    def _checked(self, shape: Shape, check: "Check", row: Row) -> Case:
        """The case of the row; stores its errors in the row, and whether they are too large."""
        sizes = (self.config.blocks, shape, self.dtype, self.meter.device)
        case = make_case(row["variant"], row["operator"], *sizes)
        if row["variant"] == "fused":
            row["fused_blocks"] = len(fusion_report(case.layer).fused) if kernels.uses_blocks(check.x) else 0
        errors, wrong = check(row["variant"], case)
        row.update(errors=correctness.finite(errors), wrong=wrong)
        return case


class Check:
    """Compares variants with their modules in float64, and with each other."""

    def __init__(self, x: Tensor, limits: Limits):
        self.x, self.limits = x, limits
        # By the name of the variant in eager mode.
        self.references: dict[str, correctness.Reference] = {}
        self.eager: dict[str, dict[str, float]] = {}

    def __call__(self, variant: str, case: Case) -> tuple[dict[str, float], str | None]:
        """The errors of a variant, and a message if one is too large."""
        same = VARIANTS[variant]
        if same not in self.references:
            self.references[same] = correctness.make_reference(case.layer, self.x)
        errors = self.references[same].errors(case.layer, case.call)
        limits = self.limits.of_errors(errors, self.eager.get(same, {}))
        if variant == same:
            self.eager[same] = errors
        return errors, correctness.worst(errors, limits)
