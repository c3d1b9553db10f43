"""What the records of benchmarks are called in tables and pictures."""

from collections.abc import Mapping
from typing import Any

Record = Mapping[str, Any]

# The forms in which an operator is timed; "conv" is torch's own layer, which all others are compared with.
VARIANTS = {
    "conv": "nn.Conv2d",
    "eager": "dcnet",
    "compiled": "dcnet, compiled",
    "naive": "naive",
    "naive-compiled": "naive, compiled",
}


def spell(shape: str) -> str:
    """The shape of a record as words: `N512xC64x32` as `N512 C64 32x32`, with its filters if they are not 3x3."""
    batch, channels, *sizes = shape.split("x")
    sides = [size for size in sizes if not size.startswith("K")]
    kernels = [size[1:] for size in sizes if size.startswith("K")]
    text = f"{batch} {channels} {sides[0]}x{sides[-1]}"
    return f"{text}, {kernels[0]}x{kernels[0]} filters" if kernels else text


def where(record: Record) -> str:
    """The GPU, or the threads of the CPU."""
    config, environment = record["config"], record["environment"]
    if config["device"] == "cuda":
        return str(environment.get("gpu", "GPU"))
    return f"CPU, {config['threads']} thread" + ("" if config["threads"] == 1 else "s")


def form(row: Record) -> str:
    """How a network is run in evaluation."""
    return ("folded" if row["folded"] else "trained") + (", compiled" if row["compiled"] else "")


def problem(row: Record) -> str:
    """Why a row has no time, in one word; nothing where it has one."""
    return "wrong" if row["wrong"] else "failed" if row["failed"] else ""


def two_digits(ratio: float | None) -> str:
    """A ratio for a table; nothing where it is not known."""
    return "" if ratio is None else f"{ratio:.2f}"


def three_digits(ms: float) -> str:
    """Milliseconds with the digits that count."""
    return f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}" if ms >= 1 else f"{ms:.3f}"
