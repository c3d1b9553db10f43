from dcnet.bench import (
    benchmark,
    block_costs,
    cluster_estimate,
    correctness,
    cuda_meter,
    head_costs,
    head_steps,
    layer_costs,
    meter,
    network_costs,
    shapes,
)

__all__ = [
    "benchmark",
    "block_costs",
    "cluster_estimate",
    "correctness",
    "cuda_meter",
    "head_costs",
    "head_steps",
    "layer_costs",
    "meter",
    "network_costs",
    "shapes",
]
