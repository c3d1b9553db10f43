"""What a sharded head would take on many GPUs, from what one was measured to take; no more than paper."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dcnet.bench.head_cases import SAMPLED, SHARDED, SINGLE, Size
from dcnet.bench.meter import MIB
from dcnet.bench.room import GIB

Row = dict[str, Any]
COUNTS = (10_000_000, 100_000_000, 1_000_000_000)
LABEL_BYTES = 8
# The cosine of the target, its logit, the highest logit and the sum over the others: one number for each sample.
SUMS = 4
# Features and labels are gathered, the sums are reduced, and so is the gradient of the features.
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
    """GPUs with a link each: what it carries in each direction, and how long a collective takes to start."""

    gpus: int
    gb_per_s: float
    start_ms: float = 0.05

    def link_ms(self, passed: float, collectives: int) -> float:
        return passed / (self.gb_per_s * 1e6) + (collectives * self.start_ms if self.gpus > 1 else 0.0)

    def ring_bytes(self, payload: int) -> int:
        """What each GPU sends when all of them reduce a payload in a ring."""
        return 2 * (self.gpus - 1) * payload // self.gpus


@dataclass(frozen=True)
class Measured:
    """What is known of one head: the line of its times, and how much of the counted memory it takes."""

    head: str
    sample: float
    ms: Line
    memory_ratio: float


@dataclass(frozen=True)
class Estimate:
    """One step of one head on so many GPUs; memory, times and bytes are those of each GPU."""

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
    """The assumptions, and steps of the sharded head and the sampled one with several numbers of classes.

    Of the size its features and the bytes of its numbers count; each GPU gives the smallest batch that was measured.
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
    """What the rows say of a head; None where there are not two numbers of classes of any batch."""
    own = [row for row in rows if row["head"] == head]
    line = line_of(own)
    if line is None:
        return None
    most = max(row["classes"] for row in own)
    counted = [Size(most, row["batch"], size.features, size.itemsize).needed_bytes(head, sample) for row in own]
    ratios = [row["peak_mib"] * MIB / need for row, need in zip(own, counted, strict=True) if row["classes"] == most]
    return Measured(head, sample, line, max(ratios))


def estimate(known: Measured, classes: int, cluster: Cluster, batch: int, size: Size) -> Estimate:
    """A step of so many classes over all the GPUs, each of which gives a batch of its own."""
    own, joint = -(-classes // cluster.gpus), cluster.gpus * batch
    counted = Size(own, joint, size.features, size.itemsize).needed_bytes(known.head, known.sample)
    gathered = (cluster.gpus - 1) * batch * (size.features * SINGLE + LABEL_BYTES)
    reduced = cluster.ring_bytes(joint * SINGLE * (size.features + SUMS))
    compute, link = known.ms.at(own, joint), cluster.link_ms(gathered + reduced, COLLECTIVES)
    # If each had all the weights instead, all of them would reduce the gradient of all the weights.
    unsharded = cluster.link_ms(cluster.ring_bytes(classes * size.features * SINGLE), 1)
    sizes = (known.head, classes, cluster.gpus, own, joint, known.memory_ratio * counted / GIB)
    return Estimate(*sizes, compute, gathered, reduced, link, compute + link, unsharded)


def line_of(rows: Sequence[Row]) -> Line | None:
    """The line of the times that were measured; None where there are not two numbers of classes of any batch."""
    slopes, fixed = {}, 0.0
    for batch in sorted({row["batch"] for row in rows}):
        own = sorted((row["classes"], row["training"]["ms"]) for row in rows if row["batch"] == batch)[-2:]
        if len(own) == 2:
            (fewer, low), (more, high) = own
            slopes[batch] = max((high - low) / (more - fewer), 0.0)
            fixed = max(low - slopes[batch] * fewer, 0.0)
    return Line(fixed, *_by_batch(slopes)) if slopes else None


def _by_batch(slopes: dict[int, float]) -> tuple[float, float]:
    """The slope by class as a + b * batch, from the two largest batches; neither a nor b is negative."""
    *_, last = slopes
    if len(slopes) == 1:
        return 0.0, slopes[last] / last
    before = list(slopes)[-2]
    per_logit = max((slopes[last] - slopes[before]) / (last - before), 0.0)
    return max(slopes[last] - per_logit * last, 0.0), per_logit


def assumptions(cluster: Cluster, batches: Sequence[int], known: Sequence[Measured]) -> list[str]:
    """All that the numbers rest on."""
    several = f"b is the slope between batches of {' and '.join(map(str, batches[-2:]))}"
    one = f"all of it is put down to b, as only batches of {batches[-1]} were measured, which is too much"
    ratios = " and ".join(f"{head.memory_ratio:.2f}" for head in known)
    return [
        f"{cluster.gpus} GPUs like the one measured hold equally many classes and give {batches[0]} samples each; each "
        "of them has the logits of all samples for its own classes.",
        "The time is fixed + classes x (a + b x batch). The slope by class is that between the two largest counts "
        f"measured; {several if len(batches) > 1 else one}. Beyond what was measured it goes on straight.",
        "The memory is what is counted of weights and logits, times what was measured at the largest count over what "
        f"is counted there: {ratios}.",
        "Each GPU receives the features, in float32, and the labels of all others.",
        f"{SUMS} numbers for each sample, and backward the gradient of all features in float32, are reduced in a ring: "
        "2 (N - 1) / N of the bytes pass each link.",
        f"Each link carries {cluster.gb_per_s:g} GB/s in each direction; each of the {COLLECTIVES} collectives takes "
        f"{cluster.start_ms:g} ms to start; none overlaps with the computation.",
        "SGD is without momentum, which adds the weights once more. The network before the head is not counted.",
    ]
