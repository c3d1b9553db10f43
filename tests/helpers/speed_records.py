"""Small records of benchmarks of networks."""

from typing import Any

Row = dict[str, Any]


def network() -> Row:
    def row(batch: int, operator: str, ratio: float) -> Row:
        training = {"ms": 10 * ratio, "ratio": ratio}
        named = {"model": "resnet32", "mode": "graph", "batch": batch, "operator": operator}
        return {
            **named,
            "wrong": None,
            "failed": None,
            "training": training,
            "memory_ratio": 1.5,
            "peak_mib": 30.0,
            "images_per_s": 51200,
        }

    rows = [row(batch, name, ratio) for batch in (512, 128) for name, ratio in {"conv": 1.0, "tanh-cos": 1.2}.items()]
    config = {"device": "cuda", "model": "resnet32", "width": 1.0, "precision": "autocast", "threads": 2}
    environment = {"torch": "2.11.0", "gpu": "NVIDIA X"}
    return {"benchmark": "network", "config": config, "environment": environment, "results": rows}


def inference(compiled: bool = False) -> Row:
    def row(operator: str, folded: bool, ms: float) -> Row:
        named = {"network": "cnn9", "operator": operator, "folded": folded, "compiled": compiled}
        return {**named, "wrong": None, "failed": None, "forward": {"ms": ms, "ratio": ms / 4}}

    rows = [row("conv", False, 5.0), row("conv", True, 4.0), row("tanh-cos", False, 10.0), row("tanh-cos", True, 6.0)]
    config = {"device": "cpu", "threads": 1, "dtype": "float32", "batch": 32, "width": 0.5}
    return {"benchmark": "inference", "config": config, "environment": {"torch": "2.13.0"}, "results": rows}
