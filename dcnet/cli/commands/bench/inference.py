"""`dcnet bench inference`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from dcnet.cli.bench_options import (
    BY_DEVICE,
    BenchOptions,
    Device,
    Shared,
    above_zero,
    at_least,
    chosen_device,
    decoupled_operators,
    known_networks,
)

OPERATORS = ("tanh-cos", "tanh(radius=8.0)-cos", "linear-cos")
BATCHES = {"cpu": 32, "cuda": 512}
WIDTHS = {"cpu": 0.5, "cuda": 1.0}
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class Command:
    """Time networks in evaluation, as trained and folded.

    The plain network with its batch normalisation folded is what all are compared with. A network whose logits differ
    from those in float64 is reported and not timed, and the exit code is 1.
    """

    device: Device = "auto"
    """Where to run; auto is cuda where there is a GPU, and cpu otherwise."""

    networks: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")] = ("cnn9", "resnet32")
    """Networks of dcnet.create_model, such as cnn9, resnet32 or timm:resnet18."""

    operators: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SPEC ...")] = OPERATORS
    """Operators such as tanh-cos or "seg(slope=0.2)-sqcos+linear"."""

    batch: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint=BY_DEVICE)] = None
    """Images of a forward pass: 32 on the cpu, 512 on cuda."""

    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        tyro.conf.arg(metavar="{bfloat16,float16,float32}", help_behavior_hint=BY_DEVICE),
    ] = None
    """What to compute in: float32 on the cpu, bfloat16 on cuda."""

    width: Annotated[float | None, tyro.conf.arg(metavar="FACTOR", help_behavior_hint=BY_DEVICE)] = None
    """Multiplies the channels of all layers: 0.5 on the cpu, 1 on cuda."""

    size: Annotated[int, tyro.conf.arg(metavar="N")] = 32
    """Height and width of the images."""

    compile: bool = False
    """Time everything compiled, too."""

    shared: Shared = field(default_factory=BenchOptions)

    def prepare(self) -> Callable[[], int]:
        from dcnet.bench.inference import InferenceBenchmark, InferenceConfig
        from dcnet.bench.meter import meter_of
        from dcnet.bench.session import Session

        device = chosen_device(self.device)
        self.shared.check()
        config = InferenceConfig(
            device=device,
            operators=decoupled_operators(self.operators),
            threads=self.shared.chosen_threads(device),
            repeats=self.shared.repeats,
            warmup=self.shared.warmup,
            networks=known_networks(self.networks),
            width=WIDTHS[device] if self.width is None else self.width,
            batch=BATCHES[device] if self.batch is None else self.batch,
            size=self.size,
            dtype=self.dtype or DTYPES[device],
            compile=self.compile,
        )
        above_zero("--width", config.width)
        at_least(8, "--size", config.size)
        at_least(2, "--batch", config.batch)
        return Session(InferenceBenchmark(config, meter_of(device)), self.shared.json, self.shared.plot).run
