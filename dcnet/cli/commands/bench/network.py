"""`dcnet bench network`."""

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

BATCHES = {"cpu": (32,), "cuda": (512, 128)}
MODES = {"cpu": ("eager",), "cuda": ("eager", "graph", "compile")}
WIDTHS = {"cpu": 0.25, "cuda": 1.0}
PRECISIONS = {"cpu": "float32", "cuda": "autocast"}


@dataclass(frozen=True, kw_only=True)
class Command:
    """Time training steps of a network, plain and decoupled.

    A step is forward, cross entropy, backward and SGD with momentum, on random images. A network whose loss differs
    from that in float64 is reported and not timed, and the exit code is 1.
    """

    device: Device = "auto"
    """Where to run; auto is cuda where there is a GPU, and cpu otherwise."""

    model: Annotated[str, tyro.conf.arg(metavar="NAME")] = "resnet32"
    """A network of dcnet.create_model, such as cnn9, resnet32 or timm:resnet18."""

    operators: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SPEC ...")] = ("tanh-cos",)
    """Operators such as tanh-cos or "seg(slope=0.2)-sqcos+linear"."""

    batch: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N ...", help_behavior_hint=BY_DEVICE)] = ()
    """Images of a step: 32 on the cpu, 512 and 128 on cuda."""

    mode: Annotated[
        tuple[Literal["eager", "graph", "compile"], ...],
        tyro.conf.arg(metavar="{eager,graph,compile} ...", help_behavior_hint=BY_DEVICE),
    ] = ()
    """How steps are run: eager is call by call, graph is the replay of a CUDA graph of the whole step, compile is a
    network compiled by torch.compile, and replayed by a graph on cuda."""

    precision: Annotated[
        Literal["autocast", "pure", "float32"] | None,
        tyro.conf.arg(metavar="{autocast,pure,float32}", help_behavior_hint=BY_DEVICE),
    ] = None
    """What to compute in: float32, bfloat16 by autocast (on cuda), or pure bfloat16, filters and all."""

    width: Annotated[float | None, tyro.conf.arg(metavar="FACTOR", help_behavior_hint=BY_DEVICE)] = None
    """Multiplies the channels of all layers: 0.25 on the cpu, 1 on cuda."""

    size: Annotated[int, tyro.conf.arg(metavar="N")] = 32
    """Height and width of the images."""

    shared: Shared = field(default_factory=BenchOptions)

    def prepare(self) -> Callable[[], int]:
        from dcnet.bench.meter import meter_of
        from dcnet.bench.network import NetworkBenchmark, NetworkConfig
        from dcnet.bench.session import Session

        device = chosen_device(self.device)
        self.shared.check()
        config = NetworkConfig(
            device=device,
            operators=decoupled_operators(self.operators),
            threads=self.shared.chosen_threads(device),
            repeats=self.shared.repeats,
            warmup=self.shared.warmup,
            model=known_networks([self.model])[0],
            width=WIDTHS[device] if self.width is None else self.width,
            size=self.size,
            batches=list(dict.fromkeys(self.batch or BATCHES[device])),
            modes=list(dict.fromkeys(self.mode or MODES[device])),
            precision=self.precision or PRECISIONS[device],
        )
        above_zero("--width", config.width)
        at_least(8, "--size", config.size)
        at_least(2, "--batch", *config.batches)
        if device == "cpu" and "graph" in config.modes:
            raise ValueError("--mode graph is a CUDA graph, which the cpu does not have: use eager or compile")
        return Session(NetworkBenchmark(config, meter_of(device)), self.shared.json, self.shared.plot).run
