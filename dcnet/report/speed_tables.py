"""Tables of benchmark records, for the terminal and for the docs."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcnet.operator import PLAIN
from dcnet.report.network_tables import inference_table, network_table
from dcnet.report.speed_cells import (
    Record,
    Row,
    count_blocks,
    matches,
    memory_heading,
    mib_of,
    place,
    problem,
    setting,
    spell,
    three_digits,
    twin_of,
    two_digits,
    unique,
    where,
    without_empty,
)
from dcnet.table import Column, Table

# The timed variants of a layer. All are compared with "conv", the layer of torch; but if the record has
# "conv-compiled", the compiled layer of torch, compiled ones are compared with that.
PLAIN_COMPILED = "conv-compiled"
VARIANTS = {
    "conv": "nn.Conv2d",
    PLAIN_COMPILED: "nn.Conv2d, compiled",
    "eager": "dcnet",
    "compiled": "dcnet, compiled",
    "naive": "naive",
    "naive-compiled": "naive, compiled",
}
# The timed variants of a series of blocks; all are compared with "plain-compiled".
BLOCK_VARIANTS = {
    "plain": "plain",
    "plain-compiled": "plain, compiled",
    "unfused": "dcnet, not fused",
    "unfused-compiled": "dcnet, not fused, compiled",
    "fused": "dcnet, fused",
}
HEADS = {"linear": "`nn.Linear`", "margin": "`MarginSoftmax`", "sharded": "one share", "sampled": "{:.0%} sampled"}
LAYER_FLOOR = "floor: lower bound, if each byte is moved once and each product computed at the device's peak speed"
HEAD_FLOOR = "floor: lower bound, if each byte is moved once per pass and each product computed at peak speed"
COMPILED_BASE = "Compiled forms are compared with the compiled plain layer."
NOT_FUSED = "The fused variant ran module by module: there is no GPU, or no fused block for this operator."


def terminal_tables(record: Record) -> list[Table]:
    """Returns the tables that `dcnet bench` prints, the summary last."""
    match record["benchmark"]:
        case "layers":
            return _variant_tables(record, LAYERS)
        case "blocks":
            return _variant_tables(record, BLOCKS)
        case "network":
            return [network_table(record)]
        case "inference":
            return [inference_table(record)]
    batches = [_batch_details(record, batch) for batch in record["config"]["batches"]]
    return [*batches, *_estimates(record)]


# Layers and blocks.


@dataclass(frozen=True)
class Variants:
    """The names of the timed variants, those that others are compared with, and how titles and headings call them."""

    names: Mapping[str, str]
    bases: tuple[str, ...]
    title: str
    heading: str

    def name(self, variant: str, shape: str) -> str:
        """Returns the name of a variant; a plain layer has the name of torch's class for the shape."""
        return self.names[variant].replace("nn.Conv2d", twin_of(shape))


LAYERS = Variants(VARIANTS, (PLAIN, PLAIN_COMPILED), "nn.Conv2d", "x plain")
BLOCKS = Variants(BLOCK_VARIANTS, ("plain-compiled",), "plain, compiled", "x plain compiled")


def base_title(record: Record) -> str:
    """Returns what the times of layers are relative to: torch's class, or "plain layer" if there are several."""
    twins = {twin_of(shape) for shape in record["config"]["shapes"]}
    return twins.pop() if len(twins) == 1 else "plain layer"


def compares_compiled(record: Record) -> bool:
    """Returns whether compiled layers are compared with compiled ones; in earlier records they are not."""
    return any(row.get("variant") == PLAIN_COMPILED for row in record["results"])


def _variant_tables(record: Record, variants: Variants) -> list[Table]:
    """Returns a table per shape, and one of means over shapes if there are several."""
    made = [_shape_details(record, shape, variants) for shape in unique(record["results"], "shape")]
    return [*made, _means(record, variants)] if len(made) > 1 else made


def _shape_details(record: Record, shape: str, variants: Variants) -> Table:
    on_gpu, x = record["config"]["device"] == "cuda", variants.heading
    headings = ["operator", "variant", "fwd, ms", x, "fwd+bwd, ms", x, *_on_gpu(on_gpu, "launches")]
    rows, sections = _floor_rows(record, shape), []
    for operator in unique(record["results"], "operator"):
        sections.append(len(rows))
        own = [row for row in record["results"] if matches(row, operator=operator, shape=shape)]
        for at, row in enumerate(own):
            rows.append(["" if at else operator, variants.name(row["variant"], shape), *_layer_cells(row, on_gpu)])
    parts = [count_blocks(record), spell(shape), record["config"]["dtype"], where(record)]
    headings.append(memory_heading(record))
    notes = [LAYER_FLOOR] if "floors_ms" in record else _fusion_notes(record)
    notes += [COMPILED_BASE] if compares_compiled(record) else []
    title = ", ".join(part for part in parts if part)
    return Table.of_rows(headings, rows, names=2, title=title, notes=notes, sections=sections)


def _floor_rows(record: Record, shape: str) -> list[list[str]]:
    floors = record.get("floors_ms", {}).get(shape)
    return [["", "floor", three_digits(floors["forward"]), "", three_digits(floors["training"])]] if floors else []


def _fusion_notes(record: Record) -> list[str]:
    """Returns a note if a fused variant had no fused block."""
    return [NOT_FUSED] if any(row.get("fused_blocks") == 0 for row in record["results"]) else []


def _layer_cells(row: Row, on_gpu: bool) -> list[str]:
    if found := problem(row):
        return [found]
    times = [
        cell
        for name in ("forward", "training")
        for cell in (three_digits(row[name]["ms"]), two_digits(row[name]["ratio"]))
    ]
    return [*times, *_on_gpu(on_gpu, str(row["training"].get("launches"))), f"{mib_of(row):.1f}"]


def _means(record: Record, variants: Variants) -> Table:
    on_gpu = record["config"]["device"] == "cuda"
    headings = ["operator", "variant", "fwd", "fwd+bwd", *_on_gpu(on_gpu, "from host", "launches"), "memory"]
    rows: list[list[str]] = []
    sections: list[int] = []
    for operator in unique(record["means"], "operator"):
        sections.append(len(rows))
        own = [one for one in record["means"] if one["operator"] == operator]
        for mean in [one for one in own if one["variant"] not in variants.bases]:
            training = mean["training"]
            more = _on_gpu(on_gpu, training.get("host_ratio"), training.get("launches_ratio"))
            ratios = [mean["forward"].get("ratio"), training.get("ratio"), *more, mean["memory_ratio"]]
            rows.append([operator, variants.names[mean["variant"]], *map(two_digits, ratios)])
    base = base_title(record) if variants is LAYERS else variants.title
    title = f"x {base}, geometric mean, {record['config']['dtype']}, {where(record)}"
    return Table.of_rows(headings, rows, names=2, title=title, sections=sections)


def layers_cpu(record: Record) -> str:
    """Returns a table per shape: forward and backward of each operator relative to the plain layer."""
    return "\n\n".join(_shape_table(record, shape).markdown_section() for shape in record["config"]["shapes"])


def _shape_table(record: Record, shape: str) -> Table:
    variants, lines = record["config"]["variants"], []
    rows = [row for row in record["results"] if row["shape"] == shape]
    for operator in record["config"]["operators"]:
        own = {row["variant"]: row for row in rows if row["operator"] == operator}
        kept = own.get("eager", {}).get("kept_mib")
        ratios = [_training_ratio(own[variant]) for variant in variants]
        lines.append([operator, *ratios, "" if kept is None else f"{kept:.0f}"])
    plain = [row for row in rows if row["variant"] == PLAIN and not problem(row)]
    ms = statistics.median(row["training"]["ms"] for row in plain)
    mib = statistics.median(row["kept_mib"] for row in plain)
    base = f"x `nn.Conv2d`, which takes {three_digits(ms)} ms and keeps {mib:.0f} MiB"
    base += ", or x the compiled layer" if any(row["variant"] == PLAIN_COMPILED for row in rows) else ""
    headings = ["operator", *(VARIANTS[variant] for variant in variants), "kept by dcnet, MiB"]
    return Table.of_rows(headings, lines, code=["operator"], title=f"{base}; {spell(shape)}{setting(record)}")


def layers_cuda(record: Record) -> str:
    """Returns a table of forward and backward of each operator relative to the plain layer, by shape and on average.

    The last column is the mean of the naive formulation, which is compiled if the layer is.
    """
    config, means = record["config"], {(mean["operator"], mean["variant"]): mean for mean in record["means"]}
    lines = []
    for operator in config["operators"]:
        for variant in [name for name in ("eager", "compiled") if name in config["variants"]]:
            rows = {row["shape"]: row for row in record["results"] if matches(row, operator=operator, variant=variant)}
            naive = means.get((operator, {"eager": "naive", "compiled": "naive-compiled"}[variant]))
            ratios = [_training_ratio(rows[shape]) for shape in config["shapes"]]
            lines.append([operator, VARIANTS[variant], *ratios, *_mean_cells(means[operator, variant], naive)])
    headings = ["operator", "form", *map(spell, config["shapes"]), "mean", "forward", "launches", "memory", "naive"]
    if not any(line[-1] for line in lines):
        headings, lines = headings[:-1], [line[:-1] for line in lines]
    title = f"Forward and backward, x `nn.Conv2d`, by CUDA graphs{setting(record)}"
    notes = [COMPILED_BASE] if compares_compiled(record) else []
    return Table.of_rows(headings, lines, names=2, code=["operator"], title=title, notes=notes).markdown_section()


def _mean_cells(mean: Row, naive: Row | None) -> list[str]:
    training, other = mean["training"], {} if naive is None else naive["training"]
    ratios = [training.get("ratio"), mean["forward"].get("ratio"), training.get("launches_ratio")]
    return [two_digits(ratio) for ratio in (*ratios, mean["memory_ratio"], other.get("ratio"))]


def blocks(record: Record) -> str:
    """Returns a table of forward and backward of blocks: ms and the ratio to the compiled plain ones, by shape."""
    config, lines = record["config"], []
    for mean in record["means"]:
        named = {"operator": mean["operator"], "variant": mean["variant"]}
        rows = {row["shape"]: row for row in record["results"] if matches(row, **named)}
        times = [_time_and_ratio(rows[shape]) for shape in config["shapes"]]
        operator = PLAIN if mean["variant"].startswith("plain") else mean["operator"]
        lines.append([operator, BLOCK_VARIANTS[mean["variant"]], *times, *_mean_cells(mean, None)[:-1]])
    headings = ["operator", "form", *map(spell, config["shapes"]), "mean", "forward", "launches", "memory"]
    clock = ", by CUDA graphs" if config["device"] == "cuda" else ""
    title = f"Forward and backward of {count_blocks(record)}, ms (x {BLOCKS.title}){clock}{setting(record)}"
    table = Table.of_rows(headings, lines, names=2, code=["operator"], title=title, notes=_fusion_notes(record))
    return without_empty(table, "launches").markdown_section()


def _time_and_ratio(row: Row) -> str:
    return problem(row) or f"{three_digits(row['training']['ms'])} (x {two_digits(row['training']['ratio'])})"


# Heads.


def heads(record: Record) -> str:
    """Returns the tables of `heads_alone`, and the estimate for many devices."""
    return "\n\n".join([heads_alone(record), *(table.markdown_section() for table in _estimates(record))])


def heads_alone(record: Record) -> str:
    """Returns a table per batch size, with time and memory of each head by the number of classes."""
    tables = [_batch_table(record, batch) for batch in record["config"]["batches"]]
    return "\n\n".join(table.markdown_section() for table in tables)


def _batch_details(record: Record, batch: int) -> Table:
    config = record["config"]
    rows: list[list[str]] = []
    sections: list[int] = []
    for row in [row for row in record["results"] if row["batch"] == batch]:
        name = f"{row['classes']:,}"
        first = not sections or rows[sections[-1]][0] != name
        sections += [len(rows)] if first else []
        rows.append([name if first else "", row["head"], *_head_cells(row)])
    headings = ("ms", "x linear", "floor, ms", "peak, MiB", "floor, MiB")
    columns = [Column("classes", "right"), Column("head"), *(Column(heading, "right") for heading in headings)]
    title = f"training step of a head, {config['margin']}, batch {batch}, {config['features']} features"
    title += f", {config['dtype']}, {where(record)}"
    return Table(columns, rows, title, [HEAD_FLOOR, *_sampling_notes(record, batch)], sections=sections)


def _sampling_notes(record: Record, batch: int) -> list[str]:
    """Returns from how many classes on sampling saves time here, interpolated between measurements."""
    own = [row for row in record["results"] if row["batch"] == batch and not problem(row)]
    times = {(row["classes"], row["head"]): row["training"]["ms"] for row in own}
    exact = "margin" if "margin" in record["config"]["heads"] else "sharded"
    ratios = [
        (classes, times[classes, "sampled"] / times[classes, exact])
        for classes in record["config"]["classes"]
        if {(classes, "sampled"), (classes, exact)} <= times.keys()
    ]
    slower = [at for at, (_, ratio) in enumerate(ratios) if ratio >= 1]
    if not ratios:
        return []
    start = f"sampling {record['config']['sample']:.0%} of the classes saves"
    if not slower:
        return [f"{start} time from {ratios[0][0]:,} classes on, the fewest measured"]
    if slower[-1] == len(ratios) - 1:
        return [f"{start} no time up to {ratios[-1][0]:,} classes, the most measured"]
    return [f"{start} time from about {_crossing(*ratios[slower[-1] : slower[-1] + 2]):,.0f} classes on"]


def _crossing(before: tuple[int, float], after: tuple[int, float]) -> float:
    """Returns the number of classes at which a ratio is 1, on a line in logarithms, with two digits."""
    (fewer, high), (more, low) = before, after
    part = math.log(high) / (math.log(high) - math.log(low))
    return float(f"{fewer * (more / fewer) ** part:.2g}")


def _head_cells(row: Row) -> list[str]:
    if found := problem(row):
        return [found]
    peak = "" if row["peak_mib"] is None else f"{row['peak_mib']:,.0f}"
    times = [three_digits(row["training"]["ms"]), two_digits(row["training"]["ratio"]), three_digits(row["floor_ms"])]
    return [*times, peak, f"{row['floor_mib']:,.0f}"]


def _batch_table(record: Record, batch: int) -> Table:
    config, lines = record["config"], []
    for classes in config["classes"]:
        rows = [row for row in record["results"] if (row["classes"], row["batch"]) == (classes, batch)]
        least = max(row["floor_ms"] for row in rows), max(row["floor_mib"] for row in rows)
        times, peaks = zip(*map(_time_and_memory, rows), strict=True)
        lines.append([f"{classes:,}", *times, three_digits(least[0]), *peaks, _gib(least[1])])
    names = [*(HEADS[head].format(config["sample"]) for head in config["heads"]), "floor"]
    headings = ["classes", *(f"{name}, {unit}" for unit in ("ms", "GiB") for name in names)]
    title = f"`{config['margin']}`, batch {batch}, {config['features']} features, {config['dtype']}, {place(record)}"
    return Table.of_rows(headings, lines, title=title)


def _time_and_memory(row: Row) -> tuple[str, str]:
    if found := problem(row):
        return found, ""
    training, ratio = row["training"], row["training"]["ratio"]
    time = three_digits(training["ms"])
    plain = row["head"] == "linear" or ratio is None
    return time if plain else f"{time} (x {two_digits(ratio)})", _gib(row["peak_mib"])


def _gib(mib: float | None) -> str:
    return "" if mib is None else f"{mib / 1024:.3f}" if mib < 1024 else f"{mib / 1024:.1f}"


def _estimates(record: Record) -> list[Table]:
    """Returns the table of estimates for many GPUs, if the record has any."""
    estimate = record.get("estimates", {"rows": []})
    if not estimate["rows"]:
        return []
    first, rows = estimate["rows"][0], [_estimated(row, record["free_gib"]) for row in estimate["rows"]]
    title = f"Estimate for {first['gpus']} GPUs with a joint batch of {first['joint_batch']:,}, per GPU"
    headings = ("memory, GiB", "compute, ms", "gathered, MB", "reduced, MB", "link, ms", "step, ms")
    columns = [Column("classes", "right"), Column("head"), *(Column(heading, "right") for heading in headings)]
    return [Table(columns, rows, title, estimate["assumptions"])]


def _estimated(row: Row, free: float | None) -> list[str]:
    passed = [f"{row[name] / 1e6:.0f}" for name in ("gathered_bytes", "reduced_bytes")]
    compute, link, step = (f"{row[name]:,.1f}" for name in ("compute_ms", "link_ms", "total_ms"))
    too_much = " (too much)" if free is not None and row["memory_gib"] > free else ""
    return [f"{row['classes']:,}", row["head"], f"{row['memory_gib']:.1f}{too_much}", compute, *passed, link, step]


def _training_ratio(row: Row) -> str:
    return problem(row) or two_digits(row["training"]["ratio"])


def _on_gpu(on_gpu: bool, *values: Any) -> Sequence[Any]:
    return values if on_gpu else ()
