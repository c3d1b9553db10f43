"""Tables of benchmark records, for the terminal and for the docs."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dcnet.operator import PLAIN
from dcnet.table import Column, Table

Record = Mapping[str, Any]
Row = Mapping[str, Any]

# The timed variants of a layer; all are compared with "conv", the layer of torch.
VARIANTS = {
    "conv": "nn.Conv2d",
    "eager": "dcnet",
    "compiled": "dcnet, compiled",
    "naive": "naive",
    "naive-compiled": "naive, compiled",
}
HEADS = {"linear": "`nn.Linear`", "margin": "`MarginSoftmax`", "sharded": "one share", "sampled": "{:.0%} sampled"}
LAYER_FLOOR = "floor: lower bound, if each byte is moved once and each product computed at the device's peak speed"
HEAD_FLOOR = "floor: lower bound, if each byte is moved once per pass and each product computed at peak speed"


def spell(shape: str) -> str:
    """Formats the shape `N512xC64x32` of a record as `N512 C64 32x32`, with the filter size if it is not 3x3."""
    batch, channels, *sizes = shape.split("x")
    sides = [size for size in sizes if not size.startswith("K")]
    kernels = [size[1:] for size in sizes if size.startswith("K")]
    text = f"{batch} {channels} {sides[0]}x{sides[-1]}"
    return f"{text}, {kernels[0]}x{kernels[0]} filters" if kernels else text


def where(record: Record) -> str:
    """Returns the device: the name of the GPU, or the number of CPU threads."""
    config, environment = record["config"], record["environment"]
    if config["device"] == "cuda":
        return str(environment.get("gpu", "GPU"))
    return f"CPU, {config['threads']} thread" + ("" if config["threads"] == 1 else "s")


def form(row: Record) -> str:
    """Describes the form of a network in evaluation: trained or folded, and compiled or not."""
    return ("folded" if row["folded"] else "trained") + (", compiled" if row["compiled"] else "")


def problem(row: Record) -> str:
    """Returns in one word why a row has no time; empty if it has one."""
    return next((name for name in ("skipped", "wrong", "failed") if row.get(name)), "")


def two_digits(ratio: float | None) -> str:
    """Formats a ratio with two decimals; empty if it is unknown."""
    return "" if ratio is None else f"{ratio:.2f}"


def three_digits(ms: float) -> str:
    """Formats milliseconds with three significant digits."""
    return f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}" if ms >= 1 else f"{ms:.3f}"


def terminal_tables(record: Record) -> list[Table]:
    """Returns the tables that `dcnet bench` prints, the summary last."""
    match record["benchmark"]:
        case "layers":
            return _layer_tables(record)
        case "network":
            return [_network_table(record)]
        case "inference":
            return [_inference_table(record)]
    batches = [_batch_details(record, batch) for batch in record["config"]["batches"]]
    return [*batches, *_estimates(record)]


# Layers.


def _layer_tables(record: Record) -> list[Table]:
    """Returns a table per shape, and one of means over shapes if there are several."""
    made = [_shape_details(record, shape) for shape in _unique(record["results"], "shape")]
    return [*made, _means(record)] if len(made) > 1 else made


def _shape_details(record: Record, shape: str) -> Table:
    on_gpu = record["config"]["device"] == "cuda"
    headings = ["operator", "variant", "fwd, ms", "x conv", "fwd+bwd, ms", "x conv", *_on_gpu(on_gpu, "launches")]
    floors = record["floors_ms"][shape]
    rows = [["", "floor", three_digits(floors["forward"]), "", three_digits(floors["training"])]]
    sections = []
    for operator in _unique(record["results"], "operator"):
        sections.append(len(rows))
        for row in [row for row in record["results"] if _is(row, operator=operator, shape=shape)]:
            name = operator if row["variant"] == PLAIN else ""
            rows.append([name, VARIANTS[row["variant"]], *_layer_cells(row, on_gpu)])
    title = f"{spell(shape)}, {record['config']['dtype']}, {where(record)}"
    headings.append(_memory_heading(record))
    return Table.of_rows(headings, rows, names=2, title=title, notes=[LAYER_FLOOR], sections=sections)


def _layer_cells(row: Row, on_gpu: bool) -> list[str]:
    if found := problem(row):
        return [found]
    times = [
        cell
        for name in ("forward", "training")
        for cell in (three_digits(row[name]["ms"]), two_digits(row[name]["ratio"]))
    ]
    return [*times, *_on_gpu(on_gpu, str(row["training"].get("launches"))), f"{_mib(row):.1f}"]


def _means(record: Record) -> Table:
    on_gpu = record["config"]["device"] == "cuda"
    headings = ["operator", "variant", "fwd", "fwd+bwd", *_on_gpu(on_gpu, "from host", "launches"), "memory"]
    rows: list[list[str]] = []
    sections: list[int] = []
    for operator in _unique(record["means"], "operator"):
        sections.append(len(rows))
        for mean in [one for one in record["means"] if one["operator"] == operator and one["variant"] != PLAIN]:
            training = mean["training"]
            more = _on_gpu(on_gpu, training.get("host_ratio"), training.get("launches_ratio"))
            ratios = [mean["forward"].get("ratio"), training.get("ratio"), *more, mean["memory_ratio"]]
            rows.append([operator, VARIANTS[mean["variant"]], *map(two_digits, ratios)])
    title = f"x nn.Conv2d, geometric mean, {record['config']['dtype']}, {where(record)}"
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
    headings = ["operator", *(VARIANTS[variant] for variant in variants), "kept by dcnet, MiB"]
    return Table.of_rows(headings, lines, code=["operator"], title=f"{base}; {spell(shape)}{_setting(record)}")


def layers_cuda(record: Record) -> str:
    """Returns a table of forward and backward of each operator relative to the plain layer, by shape and on average.

    The last column is the mean of the naive formulation, which is compiled if the layer is.
    """
    config, means = record["config"], {(mean["operator"], mean["variant"]): mean for mean in record["means"]}
    lines = []
    for operator in config["operators"]:
        for variant in [name for name in ("eager", "compiled") if name in config["variants"]]:
            rows = {row["shape"]: row for row in record["results"] if _is(row, operator=operator, variant=variant)}
            naive = means.get((operator, {"eager": "naive", "compiled": "naive-compiled"}[variant]))
            ratios = [_training_ratio(rows[shape]) for shape in config["shapes"]]
            lines.append([operator, VARIANTS[variant], *ratios, *_mean_cells(means[operator, variant], naive)])
    headings = ["operator", "form", *map(spell, config["shapes"]), "mean", "forward", "launches", "memory", "naive"]
    if not any(line[-1] for line in lines):
        headings, lines = headings[:-1], [line[:-1] for line in lines]
    title = f"Forward and backward, x `nn.Conv2d`, by CUDA graphs{_setting(record)}"
    return Table.of_rows(headings, lines, names=2, code=["operator"], title=title).markdown_section()


def _mean_cells(mean: Row, naive: Row | None) -> list[str]:
    training, other = mean["training"], {} if naive is None else naive["training"]
    ratios = [training.get("ratio"), mean["forward"].get("ratio"), training.get("launches_ratio")]
    return [two_digits(ratio) for ratio in (*ratios, mean["memory_ratio"], other.get("ratio"))]


# Networks.


def network(record: Record) -> str:
    """Returns the table of training steps, of decoupled networks compared with the plain one."""
    return _network_table(record).markdown_section()


def _network_table(record: Record) -> Table:
    config, rows = record["config"], []
    for row in [row for row in record["results"] if row["operator"] != PLAIN]:
        (plain,) = [
            base for base in record["results"] if _is(base, operator=PLAIN, mode=row["mode"], batch=row["batch"])
        ]
        rows.append([row["operator"], str(row["batch"]), row["mode"], *_network_cells(row, plain)])
    columns = [
        Column("operator", wraps=True, code=True),
        Column("batch", "right"),
        Column("mode"),
        *(Column(name, "right") for name in ("plain, ms", "decoupled, ms", "ratio", "images/s")),
        Column(_memory_heading(record), "right", detail=True),
        Column("memory", "right"),
    ]
    title = f"Training step of {config['model']}, width {config['width']:g}, {config['precision']}, {_place(record)}"
    return Table(columns, rows, title)


def _network_cells(row: Row, plain: Row) -> list[str]:
    if found := problem(row) or problem(plain):
        return [found] * 6
    times = [three_digits(entry["training"]["ms"]) for entry in (plain, row)]
    ratios = [two_digits(ratio) for ratio in (row["training"]["ratio"], row["memory_ratio"])]
    return [*times, ratios[0], f"{row['images_per_s']:,.0f}", f"{_mib(row):.0f}", ratios[1]]


def inference(record: Record) -> str:
    """Returns the table of forward passes in evaluation, of trained and folded networks."""
    return _inference_table(record).markdown_section()


def _inference_table(record: Record) -> Table:
    config, rows = record["config"], []
    for trained in [row for row in record["results"] if not row["folded"]]:
        same = {name: trained[name] for name in ("network", "operator", "compiled")}
        (folded,) = [row for row in record["results"] if _is(row, **same, folded=True)]
        plain = [row for row in record["results"] if _is(row, **same | {"operator": PLAIN}, folded=True)]
        mode = "compiled" if trained["compiled"] else "eager"
        rows.append([trained["network"], trained["operator"], mode, *_folding_cells(trained, folded, plain[0])])
    columns = [
        Column("network", wraps=True, code=True),
        Column("operator", wraps=True, code=True),
        Column("mode"),
        *(Column(name, "right") for name in ("trained, ms", "folded, ms", "folded / trained", "folded / folded plain")),
        Column("quartiles", "right", detail=True),
    ]
    title = f"Forward pass in evaluation, batch {config['batch']}, width {config['width']:g}{_setting(record)}"
    return Table(columns, rows, title)


def _folding_cells(trained: Row, folded: Row, plain: Row) -> list[str]:
    """Returns times and ratios; a compiled network is compared with the compiled plain one.

    Otherwise, the ratio is to the plain network that was timed in turns with it.
    """
    if found := problem(trained) or problem(folded) or problem(plain):
        return [found] * 4
    times = trained["forward"]["ms"], folded["forward"]["ms"]
    beside = times[1] / plain["forward"]["ms"] if folded["compiled"] else folded["forward"]["ratio"]
    quartiles = "-".join(map(two_digits, folded["forward"].get("ratio_quartiles", ())))
    return [*map(three_digits, times), *map(two_digits, (times[1] / times[0], beside)), quartiles]


def int8(record: Record) -> str:
    """Returns the table of folded networks in onnxruntime, in float32 and int8: accuracy, time and file size."""
    rows = []
    for operator, row in record["rows"].items():
        kinds = row["float32"], row["int8"]
        cells = [two_digits(kind["test_accuracy"]) for kind in kinds] + [three_digits(kind["ms"]) for kind in kinds]
        sizes = [f"{kind['bytes'] / 1024:.0f}" for kind in kinds]
        rows.append([operator, *cells, two_digits(kinds[1]["ms"] / kinds[0]["ms"]), *sizes])
    numbers = ("float32, %", "int8, %", "float32, ms", "int8, ms", "int8 / float32", "float32, KiB", "int8, KiB")
    place = f"CPU, threads: {record['environment']['threads']}, onnxruntime {record['onnxruntime']}"
    title = f"Digits, batch {record['batch']}, {place}"
    return Table.of_rows(["operator", *numbers], rows, code=["operator"], title=title).markdown_section()


# Heads.


def heads(record: Record) -> str:
    """Returns a table per batch size, with time and memory of each head by the number of classes, and the estimate."""
    tables = [*(_batch_table(record, batch) for batch in record["config"]["batches"]), *_estimates(record)]
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
    return Table(columns, rows, title, [HEAD_FLOOR], sections=sections)


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
    title = f"`{config['margin']}`, batch {batch}, {config['features']} features, {config['dtype']}, {_place(record)}"
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


def _is(row: Row, **wanted: Any) -> bool:
    return all(row[name] == value for name, value in wanted.items())


def _unique(rows: Iterable[Row], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


def _on_gpu(on_gpu: bool, *values: Any) -> Sequence[Any]:
    return values if on_gpu else ()


def _memory_heading(record: Record) -> str:
    return "peak, MiB" if record["config"]["device"] == "cuda" else "kept, MiB"


def _mib(row: Row) -> float:
    mib: float = row["peak_mib"] if "peak_mib" in row else row["kept_mib"]
    return mib


def _setting(record: Record) -> str:
    return f", {record['config']['dtype']}, channels last, {_place(record)}"


def _place(record: Record) -> str:
    return f"{where(record)}, torch {record['environment']['torch']}"
