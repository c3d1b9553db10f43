"""`dcnet bench heads`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from dcnet.cli.bench_options import BY_DEVICE, BenchOptions, Device, Shared, above_zero, at_least, chosen_device

CLASSES = {
    "cpu": (1_000, 10_000, 100_000, 1_000_000),
    "cuda": (1_000, 10_000, 100_000, 1_000_000, 10_000_000),
}
BATCHES = {"cpu": (128,), "cuda": (128, 512, 1024)}
SECONDS = {"cpu": 5.0, "cuda": 0.5}
GPUS = {"cpu": None, "cuda": 100}


@dataclass(frozen=True, kw_only=True)
class Command:
    """Time and weigh heads with a margin by their number of classes.

    A step is forward, backward and SGD. Beside MarginSoftmax there are nn.Linear with cross entropy, and the share of
    one process of ShardedMarginSoftmax, with all of its classes and with a sample of them. What does not fit into the
    memory is said and skipped. A head whose loss differs from that in float64 is reported and not timed, and the exit
    code is 1.
    """

    device: Device = "auto"
    """Where to run; auto is cuda where there is a GPU, and cpu otherwise."""

    classes: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N ...", help_behavior_hint=BY_DEVICE)] = ()
    """Numbers of classes: powers of ten from 1000, to 1,000,000 on the cpu and to 10,000,000 on cuda."""

    batch: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N ...", help_behavior_hint=BY_DEVICE)] = ()
    """Features of a step: 128 on the cpu; 128, 512 and 1024 on cuda."""

    features: Annotated[int, tyro.conf.arg(metavar="N")] = 512
    """The length of a feature."""

    heads: Annotated[
        tuple[Literal["linear", "margin", "sharded", "sampled"], ...],
        tyro.conf.arg(metavar="{linear,margin,sharded,sampled} ..."),
    ] = ("linear", "margin", "sharded", "sampled")
    """The heads to time."""

    margin: Annotated[str, tyro.conf.arg(metavar="SPEC")] = "arcface"
    """The margin of all heads but the first, such as arcface or "a-softmax(m=2)"."""

    sample: Annotated[float, tyro.conf.arg(metavar="SHARE")] = 0.1
    """The share of the classes that the sampled head uses in a step."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and features; heads with a margin compute in float32 in any case."""

    seconds: Annotated[float | None, tyro.conf.arg(metavar="S", help_behavior_hint=BY_DEVICE)] = None
    """After so many seconds no further round of a head begins, once there are three: 5 on the cpu, 0.5 on cuda."""

    gpus: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint=BY_DEVICE)] = None
    """Estimate a step on so many devices of this kind: 100 on cuda, no estimate on the cpu."""

    link: Annotated[float, tyro.conf.arg(metavar="GB/S")] = 50.0
    """What the link of each of those carries in each direction, in GB/s, for the estimate."""

    shared: Shared = field(default_factory=BenchOptions)

    def prepare(self) -> Callable[[], int]:
        from dcnet.bench.heads import HeadBenchmark, HeadConfig
        from dcnet.bench.meter import meter_of
        from dcnet.bench.session import Session
        from dcnet.losses import as_margin

        device = chosen_device(self.device)
        self.shared.check()
        config = HeadConfig(
            device=device,
            operators=[],
            threads=self.shared.chosen_threads(device),
            repeats=self.shared.repeats,
            warmup=self.shared.warmup,
            heads=list(dict.fromkeys(self.heads)),
            classes=sorted(set(self.classes or CLASSES[device])),
            batches=sorted(set(self.batch or BATCHES[device])),
            features=self.features,
            dtype=self.dtype,
            margin=str(as_margin(self.margin)),
            sample=self.sample,
            seconds=SECONDS[device] if self.seconds is None else self.seconds,
            gpus=GPUS[device] if self.gpus is None else self.gpus,
            link_gb_per_s=self.link,
        )
        at_least(2, "--classes", *config.classes)
        at_least(1, "--batch", *config.batches)
        at_least(1, "--features", config.features)
        at_least(1, "--gpus", *(() if config.gpus is None else (config.gpus,)))
        above_zero("--link", config.link_gb_per_s)
        above_zero("--seconds", config.seconds)
        if not 0 < config.sample <= 1:
            raise ValueError(f"--sample must be a share above 0 and at most 1, not {config.sample}")
        return Session(HeadBenchmark(config, meter_of(device)), self.shared.json, self.shared.plot).run
