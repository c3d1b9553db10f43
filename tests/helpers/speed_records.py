"""Small records of benchmarks."""

from typing import Any

Row = dict[str, Any]


def network(*modes: str) -> Row:
    """Training steps in graph mode (plain 10 ms, tanh-cos 12 ms) and in others, 2 ms faster with each."""
    ms = {"conv": 10.0, "tanh-cos": 12.0}
    rows = [
        step(mode, batch, operator, ms[operator] - 2 * at, (ms[operator] - 2 * at) / (10 - 2 * at))
        for at, mode in enumerate(("graph", *modes))
        for batch in (512, 128)
        for operator in ms
    ]
    config = {"device": "cuda", "model": "resnet32", "width": 1.0, "precision": "autocast", "threads": 2}
    environment = {"torch": "2.11.0", "gpu": "NVIDIA X"}
    return {"benchmark": "network", "config": config, "environment": environment, "results": rows}


def step(mode: str, batch: int, operator: str, ms: float, ratio: float) -> Row:
    named = {"model": "resnet32", "mode": mode, "batch": batch, "operator": operator, "wrong": None, "failed": None}
    memory = {"memory_ratio": 1.5, "peak_mib": 30.0}
    return {**named, "training": {"ms": ms, "ratio": ratio}, **memory, "images_per_s": 51200}


def inference(*compiled: bool) -> Row:
    """Forward passes of the plain network (trained 5 ms, folded 4 ms) and of tanh-cos (10 and 6 ms).

    If both are given, compiled ones take half the time.
    """

    def row(operator: str, folded: bool, ms: float, late: bool) -> Row:
        named = {"network": "cnn9", "operator": operator, "folded": folded, "compiled": late}
        return {**named, "wrong": None, "failed": None, "forward": {"ms": ms, "ratio": ms / 4}}

    given = compiled or (False,)
    times = [("conv", False, 5.0), ("conv", True, 4.0), ("tanh-cos", False, 10.0), ("tanh-cos", True, 6.0)]
    share = {late: 0.5 if late and len(given) > 1 else 1.0 for late in given}
    rows = [row(operator, folded, ms * share[late], late) for late in given for operator, folded, ms in times]
    config = {"device": "cpu", "threads": 1, "dtype": "float32", "batch": 32, "width": 0.5}
    return {"benchmark": "inference", "config": config, "environment": {"torch": "2.13.0"}, "results": rows}


BLOCKS = {"plain": 1.5, "plain-compiled": 1.0, "unfused": 2.0, "unfused-compiled": 1.25, "fused": 1.125}


def blocks(device: str = "cuda", fused_blocks: int = 4) -> Row:
    """Blocks of tanh-cos on two shapes; the compiled plain ones take 2 ms."""
    shapes = ["N512xC96x32", "N512xC192x16"]
    times = {name: {"ms": 2 * ratio, "ratio": ratio, "launches": 7} for name, ratio in BLOCKS.items()}
    rows = [
        {**_named(name), "shape": shape, "wrong": None, "failed": None, "forward": time, "training": time}
        | {"peak_mib": 8.0, **({"fused_blocks": fused_blocks} if name == "fused" else {})}
        for shape in shapes
        for name, time in times.items()
    ]
    means = [
        {**_named(name), "memory_ratio": 1.5, "forward": {"ratio": ratio}}
        | {"training": {"ratio": ratio, "host_ratio": 3.0, "launches_ratio": 0.5}}
        for name, ratio in BLOCKS.items()
    ]
    config = {"device": device, "threads": 2, "dtype": "bfloat16", "shapes": shapes, "blocks": 4}
    config["operators"] = ["tanh-cos"]
    environment = {"torch": "2.11.0", "gpu": "NVIDIA X"}
    return {"benchmark": "blocks", "config": config, "environment": environment, "results": rows, "means": means}


def _named(variant: str) -> Row:
    return {"operator": "tanh-cos", "variant": variant}
