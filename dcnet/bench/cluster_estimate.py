"""Estimates time and memory of a sharded head on many GPUs from measurements on one."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dcnet.bench.benchmark import Row
from dcnet.bench.head_steps import SAMPLED, SHARDED, SINGLE, Size
from dcnet.bench.meter import GIB, MIB

COUNTS = (10_000_000, 100_000_000, 1_000_000_000)
LABEL_BYTES = 8
# Numbers per sample that are reduced: the target's cosine and logit, the highest logit, and the sum over the others.
SUMS = 4
# Number of collectives: features and labels are gathered, sums and the gradient of the features are reduced.
COLLECTIVES = 2 + SUMS + 1


@dataclass(frozen=True)
class Line:
    """fixed + classes * (per_class + per_logit * batch)."""

    fixed: float
    per_class: float
    per_logit: float

    def at(self, classes: float, batch: int) -> float:
        return self.fixed + classes * (self.per_class + self.per_logit * batch)


@dataclass(frozen=True)
class Cluster:
    """Number of GPUs, bandwidth of a link in each direction, and latency of a collective."""

    gpus: int
    gb_per_s: float
    start_ms: float = 0.05

    def link_ms(self, passed: float, collectives: int) -> float:
        return passed / (self.gb_per_s * 1e6) + (collectives * self.start_ms if self.gpus > 1 else 0.0)

    def ring_bytes(self, payload: int) -> int:
        """Bytes that each GPU sends in a ring all-reduce."""
        return 2 * (self.gpus - 1) * payload // self.gpus


@dataclass(frozen=True)
class Measured:
    """Measurements of a head: the time as a function of its size, and the ratio of measured to counted memory."""

    head: str
    sample: float
    ms: Line
    memory_ratio: float


@dataclass(frozen=True)
class Estimate:
    """A training step of a head on several GPUs; memory, times and bytes are per GPU."""

    head: str
    classes: int
    gpus: int
    classes_per_gpu: int
    joint_batch: int
    memory_gib: float
    compute_ms: float
    gathered_bytes: int
    reduced_bytes: int
    link_ms: float
    total_ms: float
    unsharded_link_ms: float


def estimates(results: Sequence[Row], cluster: Cluster, size: Size, sample: float) -> dict[str, Any]:
    """The assumptions, and estimates of the sharded and the sampled head for each number of classes in `COUNTS`.

    Only `features` and `itemsize` of `size` are used; the batch per GPU is the smallest that was measured.
    """
    rows = [row for row in results if "training" in row and row["peak_mib"]]
    batches = sorted({row["batch"] for row in rows})
    found = [measured(head, rows, size, sample if head == SAMPLED else 1.0) for head in (SHARDED, SAMPLED)]
    known = [head for head in found if head is not None]
    made = [estimate(head, count, cluster, batches[0], size) for head in known for count in COUNTS]
    return {
        "assumptions": assumptions(cluster, batches, known) if known else [],
        "rows": [asdict(one) for one in made],
    }


def measured(head: str, rows: Sequence[Row], size: Size, sample: float) -> Measured | None:
    """The measurements of a head; None without two numbers of classes for the same batch size."""
    own = [row for row in rows if row["head"] == head]
    line = line_of(own)
    if line is None:
        return None
    most = max(row["classes"] for row in own)
    counted = [Size(most, row["batch"], size.features, size.itemsize).needed_bytes(head, sample) for row in own]
    ratios = [row["peak_mib"] * MIB / need for row, need in zip(own, counted, strict=True) if row["classes"] == most]
    return Measured(head, sample, line, max(ratios))


def estimate(known: Measured, classes: int, cluster: Cluster, batch: int, size: Size) -> Estimate:
    """The estimate for this number of classes in total and a batch of `batch` per GPU."""
    own, joint = -(-classes // cluster.gpus), cluster.gpus * batch
    counted = Size(own, joint, size.features, size.itemsize).needed_bytes(known.head, known.sample)
    gathered = (cluster.gpus - 1) * batch * (size.features * SINGLE + LABEL_BYTES)
    reduced = cluster.ring_bytes(joint * SINGLE * (size.features + SUMS))
    compute, link = known.ms.at(own, joint), cluster.link_ms(gathered + reduced, COLLECTIVES)
    # For comparison: without sharding, the gradient of all weights would be reduced.
    unsharded = cluster.link_ms(cluster.ring_bytes(classes * size.features * SINGLE), 1)
    sizes = (known.head, classes, cluster.gpus, own, joint, known.memory_ratio * counted / GIB)
    return Estimate(*sizes, compute, gathered, reduced, link, compute + link, unsharded)


def line_of(rows: Sequence[Row]) -> Line | None:
    """The line through the measured times; None without two numbers of classes for the same batch size."""
    slopes, fixed = {}, 0.0
    for batch in sorted({row["batch"] for row in rows}):
        own = sorted((row["classes"], row["training"]["ms"]) for row in rows if row["batch"] == batch)[-2:]
        if len(own) == 2:
            (fewer, low), (more, high) = own
            slopes[batch] = max((high - low) / (more - fewer), 0.0)
            fixed = max(low - slopes[batch] * fewer, 0.0)
    return Line(fixed, *_by_batch(slopes)) if slopes else None


def _by_batch(slopes: dict[int, float]) -> tuple[float, float]:
    """The slope per class as a + b * batch from the two largest batches; a and b are not negative."""
    *_, last = slopes
    if len(slopes) == 1:
        return 0.0, slopes[last] / last
    before = list(slopes)[-2]
    per_logit = max((slopes[last] - slopes[before]) / (last - before), 0.0)
    return max(slopes[last] - per_logit * last, 0.0), per_logit


def assumptions(cluster: Cluster, batches: Sequence[int], known: Sequence[Measured]) -> list[str]:
    """The assumptions of the estimates, one sentence each."""
    several = f"b is the slope between batches of {' and '.join(map(str, batches[-2:]))}"
    one = f"only batches of {batches[-1]} were measured, so b is the whole slope, which is too much"
    ratios = " and ".join(f"{head.memory_ratio:.2f}" for head in known)
    return [
        f"{cluster.gpus} GPUs like the measured one share the classes evenly. Each adds {batches[0]} samples to the "
        "joint batch, and computes the logits of the joint batch for its own classes.",
        "The time is fixed + classes x (a + b x batch). The slope per class is that between the two largest numbers of "
        f"classes measured; {several if len(batches) > 1 else one}. Larger sizes are extrapolated linearly.",
        "The memory is that of weights and logits, times the ratio of measured to counted memory at the largest number "
        f"of classes: {ratios}.",
        "Each GPU receives the features, in float32, and the labels of all other GPUs.",
        f"{SUMS} numbers per sample, and the gradient of all features in float32, are reduced in a ring: each link "
        "carries 2 (N - 1) / N of the bytes.",
        f"A link has {cluster.gb_per_s:g} GB/s in each direction; each of the {COLLECTIVES} collectives takes "
        f"{cluster.start_ms:g} ms to start; none overlaps with the computation.",
        "SGD has no momentum, which would need as much memory as the weights. The network before the head is not "
        "included.",
    ]
