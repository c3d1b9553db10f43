"""The records of benchmarks made into Markdown tables."""

import statistics
from typing import Any

from dcnet.report.markdown import markdown
from dcnet.report.words import VARIANTS, problem, spell, three_digits, two_digits, where

Record = dict[str, Any]
Row = dict[str, Any]
PLAIN = "conv"


def layers_cpu(record: Record) -> str:
    """Forward and backward of each operator's layer against the plain one, a table a shape."""
    return "\n\n".join(_layers_of(record, shape) for shape in record["config"]["shapes"])


def _layers_of(record: Record, shape: str) -> str:
    variants, lines = record["config"]["variants"], []
    rows = [row for row in record["results"] if row["shape"] == shape]
    for operator in record["config"]["operators"]:
        own = {row["variant"]: row for row in rows if row["operator"] == operator}
        kept = own.get("eager", {}).get("kept_mib")
        ratios = [_training_ratio(own[variant]) for variant in variants]
        lines.append([f"`{operator}`", *ratios, "" if kept is None else f"{kept:.0f}"])
    plain = [row for row in rows if row["variant"] == PLAIN and not problem(row)]
    ms, mib = (statistics.median(values) for values in zip(*map(_cost, plain), strict=True))
    base = f"x `nn.Conv2d`, which takes {three_digits(ms)} ms and keeps {mib:.0f} MiB"
    about = f"{base}; {spell(shape)}{_setting(record)}:"
    headings = ["operator", *(VARIANTS[variant] for variant in variants), "kept by dcnet, MiB"]
    return f"{about}\n\n{markdown(headings, lines)}"


def _cost(plain: Row) -> tuple[float, float]:
    return plain["training"]["ms"], plain["kept_mib"]


def layers_cuda(record: Record) -> str:
    """Forward and backward of each operator's layer against the plain one on every shape, and the means of it all.

    The naive formulation stands beside the layer, as it is or compiled as the layer is.
    """
    config, means = record["config"], {(mean["operator"], mean["variant"]): mean for mean in record["means"]}
    lines = []
    for operator in config["operators"]:
        for variant in [name for name in ("eager", "compiled") if name in config["variants"]]:
            rows = {row["shape"]: row for row in record["results"] if _is(row, operator=operator, variant=variant)}
            naive = means.get((operator, {"eager": "naive", "compiled": "naive-compiled"}[variant]))
            ratios = [_training_ratio(rows[shape]) for shape in config["shapes"]]
            lines.append([f"`{operator}`", VARIANTS[variant], *ratios, *_mean_cells(means[operator, variant], naive)])
    headings = ["operator", "form", *map(spell, config["shapes"]), "mean", "forward", "launches", "memory", "naive"]
    if not any(line[-1] for line in lines):
        headings, lines = headings[:-1], [line[:-1] for line in lines]
    about = f"Forward and backward, x `nn.Conv2d`, by CUDA graphs{_setting(record)}:"
    return f"{about}\n\n{markdown(headings, lines)}"


def _mean_cells(mean: Row, naive: Row | None) -> list[str]:
    training, other = mean["training"], {} if naive is None else naive["training"]
    ratios = [training.get("ratio"), mean["forward"].get("ratio"), training.get("launches_ratio")]
    return [two_digits(ratio) for ratio in (*ratios, mean["memory_ratio"], other.get("ratio"))]


def network(record: Record) -> str:
    """Training steps of each operator's network against the plain one."""
    config, lines = record["config"], []
    for row in [row for row in record["results"] if row["operator"] != PLAIN]:
        (plain,) = [base for base in record["results"] if _is(base, PLAIN, mode=row["mode"], batch=row["batch"])]
        names = [f"`{row['operator']}`", str(row["batch"]), row["mode"]]
        if found := problem(row) or problem(plain):
            lines.append([*names, *[found] * 5])
            continue
        times = [three_digits(entry["training"]["ms"]) for entry in (plain, row)]
        ratios = [two_digits(ratio) for ratio in (row["training"]["ratio"], row["memory_ratio"])]
        lines.append([*names, *times, ratios[0], f"{row['images_per_s']:,.0f}", ratios[1]])
    headings = ["operator", "batch", "mode", "plain, ms", "decoupled, ms", "ratio", "images/s", "memory"]
    about = f"`{config['model']}`, width {config['width']:g}, {config['precision']}, {_place(record)}:"
    return f"{about}\n\n{markdown(headings, lines)}"


def inference(record: Record) -> str:
    """The forward pass of each network in evaluation, trained and folded, and against the folded plain one."""
    config, lines = record["config"], []
    for trained in [row for row in record["results"] if not row["folded"]]:
        same = {name: trained[name] for name in ("network", "operator", "compiled")}
        (folded,) = [row for row in record["results"] if _is(row, **same, folded=True)]
        (plain,) = [row for row in record["results"] if _is(row, **same | {"operator": PLAIN}, folded=True)]
        name = f"`{trained['network']}`, `{trained['operator']}`" + (", compiled" if trained["compiled"] else "")
        lines.append([name, *_folding_cells(trained, folded, plain)])
    headings = ["network", "trained, ms", "folded, ms", "folded / trained", "folded / folded plain"]
    about = f"Batch {config['batch']}, width {config['width']:g}{_setting(record)}:"
    return f"{about}\n\n{markdown(headings, lines)}"


def int8(record: Record) -> str:
    """Accuracy, time and file size of folded networks in onnxruntime, in float32 and quantized to int8."""
    lines = []
    for operator, row in record["rows"].items():
        kinds = row["float32"], row["int8"]
        cells = [two_digits(kind["test_accuracy"]) for kind in kinds] + [three_digits(kind["ms"]) for kind in kinds]
        sizes = [f"{kind['bytes'] / 1024:.0f}" for kind in kinds]
        lines.append([f"`{operator}`", *cells, two_digits(kinds[1]["ms"] / kinds[0]["ms"]), *sizes])
    headings = ["operator", "float32, %", "int8, %", "float32, ms", "int8, ms", "int8 / float32"]
    headings += ["float32, KiB", "int8, KiB"]
    place = f"CPU, threads: {record['environment']['threads']}, onnxruntime {record['onnxruntime']}"
    return f"Digits, batch {record['batch']}, {place}:\n\n{markdown(headings, lines)}"


def _folding_cells(trained: Row, folded: Row, plain: Row) -> list[str]:
    """The plain network is the one that is compiled as well where this one is, and else the one timed in turns."""
    if found := problem(trained) or problem(folded) or problem(plain):
        return [found] * 4
    times = trained["forward"]["ms"], folded["forward"]["ms"]
    beside = times[1] / plain["forward"]["ms"] if folded["compiled"] else folded["forward"]["ratio"]
    ratios = times[1] / times[0], beside
    return [*map(three_digits, times), *map(two_digits, ratios)]


def _training_ratio(row: Row) -> str:
    return problem(row) or two_digits(row["training"]["ratio"])


def _is(row: Row, operator: str | None = None, **wanted: Any) -> bool:
    return operator in (None, row["operator"]) and all(row[name] == value for name, value in wanted.items())


def _setting(record: Record) -> str:
    return f", {record['config']['dtype']}, channels last, {_place(record)}"


def _place(record: Record) -> str:
    return f"{where(record)}, torch {record['environment']['torch']}"
