"""`dcnet bench layers`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from dcnet.cli.bench_options import (
    BY_DEVICE,
    BenchOptions,
    Device,
    Shared,
    at_least,
    chosen_device,
    decoupled_operators,
)

OPERATORS = ("tanh-cos", "tanh(radius=8.0)-cos", "seg-sqcos", "sphere-cos", "linear-cos")
SHAPES = {
    "cpu": ("N32xC64x32",),
    "cuda": ("N512xC64x32", "N512xC96x32", "N512xC192x16", "N512xC384x8", "N256xC64x56", "N256xC256x14"),
}
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class Command:
    """Time single layers against nn.Conv2d, forward and forward + backward.

    Every operator is timed as the layer of this library and as the naive formulation, each as it is and compiled, in
    turns with nn.Conv2d. A layer whose output or gradients differ from those in float64 is reported and not timed, and
    the exit code is 1.
    """

    device: Device = "auto"
    """Where to run; auto is cuda where there is a GPU, and cpu otherwise."""

    operators: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SPEC ...")] = OPERATORS
    """Operators such as tanh-cos or "seg(slope=0.2)-sqcos+linear"."""

    shapes: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SHAPE ...", help_behavior_hint=BY_DEVICE)] = ()
    """Images such as N32xC64x32: 32 of them, 64 channels, 32x32 pixels; N8xC3x32x48xK5 for 32x48 pixels and 5x5
    filters. There are as many filters as channels."""

    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        tyro.conf.arg(metavar="{bfloat16,float16,float32}", help_behavior_hint=BY_DEVICE),
    ] = None
    """What to compute in: float32 on the cpu, bfloat16 on cuda."""

    variants: Annotated[
        tuple[Literal["eager", "compiled", "naive", "naive-compiled"], ...],
        tyro.conf.arg(metavar="{eager,compiled,naive,naive-compiled} ..."),
    ] = ("eager", "compiled", "naive", "naive-compiled")
    """The forms to time beside nn.Conv2d: the layer of this library, the same compiled, the naive formulation, the
    same compiled. Compiling takes a while."""

    check_batch: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="(default: all)")] = None
    """Images of the batch to compare with float64; fewer are quicker, but are then compiled for separately."""

    shared: Shared = field(default_factory=BenchOptions)

    def prepare(self) -> Callable[[], int]:
        from dcnet.bench.layers import LayerBenchmark, LayerConfig
        from dcnet.bench.meter import meter_of
        from dcnet.bench.session import Session
        from dcnet.bench.shapes import Shape

        device = chosen_device(self.device)
        self.shared.check()
        if self.check_batch is not None:
            at_least(1, "--check-batch", self.check_batch)
        config = LayerConfig(
            device=device,
            operators=decoupled_operators(self.operators),
            threads=self.shared.chosen_threads(device),
            repeats=self.shared.repeats,
            warmup=self.shared.warmup,
            shapes=list(dict.fromkeys(str(Shape.parse(text)) for text in self.shapes or SHAPES[device])),
            variants=list(dict.fromkeys(self.variants)),
            dtype=self.dtype or DTYPES[device],
            check_batch=self.check_batch,
        )
        return Session(LayerBenchmark(config, meter_of(device)), self.shared.json, self.shared.plot).run
