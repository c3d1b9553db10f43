"""Measure the cost of decoupling on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import tyro

import dcnet
from dcnet import bench
from dcnet.cli import options

if TYPE_CHECKING:
    from dcnet.bench.benchmark import Benchmark, Config


def by_device(metavar: str) -> Any:
    """Returns the help settings of an option whose default depends on the device."""
    return options.arg(metavar, "by device")


Names = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")]
NumbersByDevice = Annotated[tuple[int, ...], by_device("N ...")]
NumberByDevice = Annotated[int | None, by_device("N")]
FactorByDevice = Annotated[float | None, by_device("FACTOR")]
Dtype = Annotated[Literal["bfloat16", "float16", "float32"] | None, by_device("{bfloat16,float16,float32}")]
Minutes = Annotated[float | None, options.arg("MINUTES", "no limit")]
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class BenchOptions(options.DeviceOption):
    """Options of every benchmark."""

    repeats: options.Number = 20
    """Timed rounds; each round times everything once, in turns."""

    warmup: options.Number = 3
    """Warmup rounds, which do not count."""

    threads: NumberByDevice = None
    """CPU threads of torch: 2 on the cpu, torch's default on cuda."""

    json: options.OptionalFile = None
    """Write the measurements to this file."""

    plot: options.OptionalFile = None
    """Draw the measurements into this file, .png or .svg."""

    def common(self, device: str, operators: Sequence[str] = ()) -> dict[str, Any]:
        """Checks the options that all benchmarks share; returns their values for a config."""
        options.check_at_least(2, "--repeats", self.repeats)
        options.check_at_least(0, "--warmup", self.warmup)
        options.check_at_least(1, "--threads", self.threads)
        if self.plot is not None:
            options.output_file("--plot", self.plot)
        if self.json is not None:
            options.writable(str(self.json))
        return {
            "device": device,
            "operators": options.decoupled_operators(operators) if operators else [],
            "threads": self.threads or bench.meter.default_threads(device),
            "repeats": self.repeats,
            "warmup": self.warmup,
        }

    def session(self, benchmark: Callable[[Any, Any], Benchmark[Any]], config: Config) -> Callable[[], int]:
        made = benchmark(config, bench.meter.meter_of(config.device))
        return bench.benchmark.Session(made, self.json, self.plot).run


@dataclass(frozen=True, kw_only=True)
class Layers(BenchOptions):
    """Time single layers against torch's, such as nn.Conv2d, forward and forward + backward.

    Each operator is timed as a layer of dcnet and as the naive formulation, both eager and compiled, in turns with the
    plain layer of torch, eager and compiled. A layer whose output or gradients differ from those in float64 is reported
    but not timed, and the exit code is 1. An operator that a layer does not support is reported and skipped.
    """

    operators: options.Specs = ("tanh-cos", "tanh(radius=8.0)-cos", "seg-sqcos", "sphere-cos", "linear-cos")
    """Operators such as tanh-cos or "seg(slope=0.2)-sqcos+linear"."""

    shapes: Annotated[tuple[str, ...], by_device("SHAPE ...")] = ()
    """Inputs such as N32xC64x32: 32 images, 64 channels, 32x32 pixels; N8xC4x32x48xK5xG2 for 32x48 pixels, 5x5 filters
    and 2 groups. N32xC64xL100 are sequences, N8xC16xD8x28 volumes of 8x28x28. There are as many filters as channels.
    M1576x192-768 is a linear layer for 1576 rows, from 192 to 768 features; B4xH3xT197xD64 is attention with 4 samples,
    3 heads, 197 tokens and 64 features. linear, depthwise, pointwise and attention are sets of common shapes for the
    device."""

    dtype: Dtype = None
    """The dtype: float32 on the cpu, bfloat16 on cuda."""

    variants: Annotated[
        tuple[Literal["eager", "compiled", "naive", "naive-compiled"], ...],
        tyro.conf.arg(metavar="{eager,compiled,naive,naive-compiled} ..."),
    ] = ("eager", "compiled", "naive", "naive-compiled")
    """What to time besides the plain layer: the layer of dcnet (eager, compiled) and the naive formulation. Compiled
    ones are compared with the compiled plain layer. Compiling takes a while."""

    check_batch: Annotated[int | None, options.arg("N", "all")] = None
    """The number of images or rows to compare with float64; fewer are faster, but are compiled separately."""

    minutes: Minutes = None
    """Start no more layers after this many minutes; the others are reported as skipped."""

    def prepare(self) -> Callable[[], int]:
        device = self.chosen_device()
        options.check_at_least(1, "--check-batch", self.check_batch)
        options.check_above_zero("--minutes", self.minutes)
        config = bench.layer_costs.LayerConfig(
            **self.common(device, self.operators),
            shapes=bench.shapes.expand_shapes(self.shapes or SHAPES[device], device),
            variants=_once(self.variants),
            dtype=self.dtype or DTYPES[device],
            check_batch=self.check_batch,
            minutes=self.minutes,
        )
        return self.session(bench.layer_costs.LayerBenchmark, config)


SHAPES = {
    "cpu": ("N32xC64x32",),
    "cuda": ("N512xC64x32", "N512xC96x32", "N512xC192x16", "N512xC384x8", "N256xC64x56", "N256xC256x14"),
}


@dataclass(frozen=True, kw_only=True)
class Blocks(BenchOptions):
    """Time blocks of convolution, batch normalization and ReLU, plain and decoupled.

    Plain blocks run eager and compiled; decoupled ones run eager, compiled, and with dcnet.fuse. All are timed in
    turns, forward and forward + backward, and are compared with the compiled plain blocks. Blocks whose output or
    gradients differ from those in float64 are reported but not timed, and the exit code is 1.
    """

    operators: options.Specs = ("tanh-cos",)
    """Operators such as tanh-cos or "seg(slope=0.2)-sqcos+linear"."""

    shapes: Annotated[tuple[str, ...], by_device("SHAPE ...")] = ()
    """Inputs such as N32xC64x32: 32 images, 64 channels, 32x32 pixels. All blocks have as many filters as channels."""

    blocks: options.Number = 4
    """The number of blocks, one after the other."""

    dtype: Dtype = None
    """The dtype of filters and images: float32 on the cpu, bfloat16 on cuda. Batch normalization has float32
    parameters."""

    check_batch: Annotated[int | None, options.arg("N", "all")] = None
    """The number of images to compare with float64; fewer are faster, but are compiled separately."""

    def prepare(self) -> Callable[[], int]:
        device = self.chosen_device()
        options.check_at_least(1, "--blocks", self.blocks)
        options.check_at_least(1, "--check-batch", self.check_batch)
        config = bench.block_costs.BlockConfig(
            **self.common(device, self.operators),
            shapes=_once(str(bench.shapes.Shape.parse(text)) for text in self.shapes or BLOCK_SHAPES[device]),
            blocks=self.blocks,
            dtype=self.dtype or DTYPES[device],
            check_batch=self.check_batch,
        )
        return self.session(bench.block_costs.BlockBenchmark, config)


BLOCK_SHAPES = {"cpu": ("N32xC64x16",), "cuda": ("N512xC96x32", "N512xC192x16", "N512xC384x8")}


@dataclass(frozen=True, kw_only=True)
class Network(BenchOptions):
    """Time training steps of networks, plain and decoupled.

    A step is forward, cross entropy, backward and SGD with momentum, on random images. A network whose loss differs
    from that in float64 is reported but not timed, and the exit code is 1. In networks of timm, all convolutions and
    linear layers except the classifier are decoupled.
    """

    model: Names = ("resnet32",)
    """Networks of dcnet.create_model, such as cnn9, resnet32 or timm:resnet18; timm stands for five networks: resnet50,
    convnext_tiny, mobilenetv3_large_100, efficientnet_b0 and vit_small_patch16_224."""

    operators: options.Specs = ("tanh-cos",)
    """Operators such as tanh-cos or "seg(slope=0.2)-sqcos+linear"."""

    batch: NumbersByDevice = ()
    """Batch sizes: 32 on the cpu; on cuda 512 and 128, or 128 for networks of timm."""

    mode: Annotated[tuple[Literal["eager", "graph", "compile"], ...], by_device("{eager,graph,compile} ...")] = ()
    """How steps run: eager; graph replays the whole step as a CUDA graph; compile uses torch.compile, and a graph on
    cuda."""

    precision: Annotated[Literal["autocast", "pure", "float32"] | None, by_device("{autocast,pure,float32}")] = None
    """The precision: float32, bfloat16 by autocast (on cuda), or pure bfloat16, including the filters."""

    width: FactorByDevice = None
    """Multiplier of the channels of all layers: 0.25 on the cpu, 1 on cuda and for networks of timm."""

    size: Annotated[int | None, options.arg("N", "by network")] = None
    """Height and width of the images: 32, or 224 if there are networks of timm."""

    fuse: Annotated[bool, tyro.conf.arg(help_behavior_hint="(default: fused)")] = True
    """Time decoupled networks on cuda without fused blocks."""

    check_batch: Annotated[int | None, options.arg("N", "by network")] = None
    """The number of images to compare with float64: all, or 8 if there are networks of timm. If it is less than the
    batch, a compiled network is compared with the eager one on the whole batch."""

    plans: Annotated[Literal["all", "ten"] | None, options.arg("{all,ten}", "by network")] = None
    """The plans of cuDNN to time for each convolution, plain and decoupled: all, or ten if there are networks of timm,
    whose many convolutions would take minutes."""

    minutes: Minutes = None
    """Start no more networks after this many minutes; the others are reported as skipped."""

    def prepare(self) -> Callable[[], int]:
        device = self.chosen_device()
        cuda = device == "cuda"
        names = options.known_networks(bench.timed_networks.expand_networks(self.model))
        timm = any(map(bench.timed_networks.is_timm, names))
        if timm and self.width not in (None, 1):
            raise ValueError(f"--width must be 1 for networks of timm, not {self.width:g}")
        config = bench.network_costs.NetworkConfig(
            **self.common(device, self.operators),
            models=names,
            width=(1.0 if cuda or timm else 0.25) if self.width is None else self.width,
            size=(224 if timm else 32) if self.size is None else self.size,
            batches=_once(self.batch or ((128,) if cuda and timm else (512, 128) if cuda else (32,))),
            modes=_once(self.mode or (("eager", "graph", "compile") if cuda else ("eager",))),
            precision=self.precision or ("autocast" if cuda else "float32"),
            fuse=self.fuse,
            check_batch=(8 if timm else None) if self.check_batch is None else self.check_batch,
            plans=self.plans or ("ten" if timm else "all"),
            minutes=self.minutes,
        )
        options.check_at_least(2, "--check-batch", config.check_batch)
        options.check_above_zero("--minutes", config.minutes)
        options.check_above_zero("--width", config.width)
        options.check_at_least(8, "--size", config.size)
        options.check_at_least(2, "--batch", *config.batches)
        if not cuda and "graph" in config.modes:
            raise ValueError("--mode graph needs cuda, since it is a CUDA graph: use eager or compile on the cpu")
        return self.session(bench.network_costs.NetworkBenchmark, config)


@dataclass(frozen=True, kw_only=True)
class Inference(BenchOptions):
    """Time networks in evaluation mode, as trained and folded.

    All are compared with the folded plain network. A network whose logits differ from those in float64 is reported but
    not timed, and the exit code is 1.
    """

    networks: Names = ("cnn9", "resnet32")
    """Networks of dcnet.create_model, such as cnn9, resnet32 or timm:resnet18."""

    operators: options.Specs = ("tanh-cos", "tanh(radius=8.0)-cos", "linear-cos")
    """Operators such as tanh-cos or "seg(slope=0.2)-sqcos+linear"."""

    batch: NumberByDevice = None
    """The batch size: 32 on the cpu, 512 on cuda."""

    dtype: Dtype = None
    """The dtype: float32 on the cpu, bfloat16 on cuda."""

    width: FactorByDevice = None
    """Multiplier of the channels of all layers: 0.5 on the cpu, 1 on cuda."""

    size: options.Number = 32
    """Height and width of the images."""

    compile: bool = False
    """Also time everything with torch.compile."""

    def prepare(self) -> Callable[[], int]:
        device = self.chosen_device()
        cuda = device == "cuda"
        config = bench.network_costs.InferenceConfig(
            **self.common(device, self.operators),
            networks=options.known_networks(self.networks),
            width=(1.0 if cuda else 0.5) if self.width is None else self.width,
            batch=(512 if cuda else 32) if self.batch is None else self.batch,
            size=self.size,
            dtype=self.dtype or DTYPES[device],
            compile=self.compile,
        )
        options.check_above_zero("--width", config.width)
        options.check_at_least(8, "--size", config.size)
        options.check_at_least(2, "--batch", config.batch)
        return self.session(bench.network_costs.InferenceBenchmark, config)


@dataclass(frozen=True, kw_only=True)
class Heads(BenchOptions):
    """Measure time and memory of heads with a margin, by the number of classes.

    A step is forward, backward and SGD. MarginSoftmax is compared with nn.Linear and cross entropy, and with one
    process's share of ShardedMarginSoftmax, with all classes and with sampled classes; the result says from how many
    classes on sampling saves time. A head that does not fit into memory is reported and skipped. A head whose loss
    differs from that in float64 is reported but not timed, and the exit code is 1.
    """

    classes: NumbersByDevice = ()
    """Numbers of classes: powers of ten from 1,000 to 1,000,000 on the cpu, and to 10,000,000 on cuda."""

    batch: NumbersByDevice = ()
    """Batch sizes: 128 on the cpu; 128, 512 and 1024 on cuda."""

    features: options.Number = 512
    """The number of features."""

    heads: Annotated[
        tuple[Literal["linear", "margin", "sharded", "sampled"], ...],
        tyro.conf.arg(metavar="{linear,margin,sharded,sampled} ..."),
    ] = ("linear", "margin", "sharded", "sampled")
    """The heads to time."""

    margin: Annotated[str, tyro.conf.arg(metavar="SPEC")] = "arcface"
    """The margin of all heads except linear, such as arcface or "a-softmax(m=2)"."""

    sample: Annotated[float, tyro.conf.arg(metavar="SHARE")] = 0.1
    """The share of the classes that the sampled head uses in each step."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of weights and features; heads with a margin always compute in float32."""

    seconds: Annotated[float | None, by_device("S")] = None
    """Stop after this many seconds per head, but not before three rounds: 5 on the cpu, 0.5 on cuda."""

    gpus: NumberByDevice = None
    """Estimate a step on this many GPUs of this kind: 100 on cuda, no estimate on the cpu."""

    link: Annotated[float, tyro.conf.arg(metavar="GB/S")] = 50.0
    """For the estimate: the link bandwidth of each device, per direction, in GB/s."""

    def prepare(self) -> Callable[[], int]:
        device = self.chosen_device()
        cuda = device == "cuda"
        config = bench.head_costs.HeadConfig(
            **self.common(device),
            heads=_once(self.heads),
            classes=sorted(set(self.classes or [10**power for power in range(3, 8 if cuda else 7)])),
            batches=sorted(set(self.batch or ((128, 512, 1024) if cuda else (128,)))),
            features=self.features,
            dtype=self.dtype,
            margin=str(dcnet.losses.as_margin(self.margin)),
            sample=self.sample,
            seconds=(0.5 if cuda else 5.0) if self.seconds is None else self.seconds,
            gpus=(100 if cuda else None) if self.gpus is None else self.gpus,
            link_gb_per_s=self.link,
        )
        options.check_at_least(2, "--classes", *config.classes)
        options.check_at_least(1, "--batch", *config.batches)
        options.check_at_least(1, "--features", config.features)
        options.check_at_least(1, "--gpus", config.gpus)
        options.check_above_zero("--link", config.link_gb_per_s)
        options.check_above_zero("--seconds", config.seconds)
        if not 0 < config.sample <= 1:
            raise ValueError(f"--sample must be a share above 0 and at most 1, not {config.sample}")
        return self.session(bench.head_costs.HeadBenchmark, config)


def _once(items: Iterable[Item]) -> list[Item]:
    return list(dict.fromkeys(items))


COMMANDS = {"blocks": Blocks, "heads": Heads, "inference": Inference, "layers": Layers, "network": Network}
