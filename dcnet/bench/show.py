"""Records as tables on the terminal."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.table import Table

from dcnet.bench.show_heads import heads
from dcnet.operator import PLAIN
from dcnet.report.words import VARIANTS, form, problem, spell, three_digits, two_digits, where

Record = Mapping[str, Any]
Row = Mapping[str, Any]


def tables(record: Record) -> list[Table]:
    """The tables of a record, the last of which says it all in short."""
    made = {"layers": _layers, "network": _network, "inference": _inference, "heads": heads}
    return made[record["benchmark"]](record)


def _layers(record: Record) -> list[Table]:
    made = [_shape(record, shape) for shape in dict.fromkeys(row["shape"] for row in record["results"])]
    return [*made, _means(record)] if len(made) > 1 else made


def _shape(record: Record, shape: str) -> Table:
    on_gpu = record["config"]["device"] == "cuda"
    headings = ("fwd, ms", "x conv", "fwd+bwd, ms", "x conv", *_own(on_gpu, "launches"), _memory(record))
    table = _table(f"{spell(shape)}, {_about(record)}", ("operator", "variant"), headings)
    floors = record["floors_ms"][shape]
    table.add_row("", "floor", three_digits(floors["forward"]), "", three_digits(floors["training"]), end_section=True)
    table.caption = "floor: every byte moved once and every product formed, at the best speed of this device"
    for operator, rows in _by(record["results"], "operator", shape=shape).items():
        for row in rows:
            name = operator if row["variant"] == PLAIN else ""
            table.add_row(name, VARIANTS[row["variant"]], *_layer_cells(row, on_gpu))
        table.add_section()
    return table


def _layer_cells(row: Row, on_gpu: bool) -> list[str]:
    if found := problem(row):
        return [found]
    times = [
        cell
        for name in ("forward", "training")
        for cell in (three_digits(row[name]["ms"]), two_digits(row[name]["ratio"]))
    ]
    return [*times, *_own(on_gpu, str(row["training"].get("launches"))), f"{_mib(row):.1f}"]


def _means(record: Record) -> Table:
    on_gpu = record["config"]["device"] == "cuda"
    headings = ("fwd", "fwd+bwd", *_own(on_gpu, "from host", "launches"), "memory")
    table = _table(f"x nn.Conv2d, geometric mean, {_about(record)}", ("operator", "variant"), headings)
    for operator, means in _by(record["means"], "operator").items():
        for mean in [mean for mean in means if mean["variant"] != PLAIN]:
            training = mean["training"]
            beside = _own(on_gpu, training.get("host_ratio"), training.get("launches_ratio"))
            ratios = [mean["forward"].get("ratio"), training.get("ratio"), *beside, mean["memory_ratio"]]
            table.add_row(operator, VARIANTS[mean["variant"]], *map(two_digits, ratios))
        table.add_section()
    return table


def _network(record: Record) -> list[Table]:
    config = record["config"]
    about = f"training step of {config['model']}, width {config['width']:g}, {config['precision']}, {where(record)}"
    headings = ("ms", "x conv", "images/s", _memory(record), "x conv")
    table = _table(about, ("batch", "mode", "operator"), headings)
    for row in record["results"]:
        names = (str(row["batch"]), row["mode"], row["operator"])
        if found := problem(row):
            table.add_row(*names, found)
            continue
        cells = (f"{row['images_per_s']:,.0f}", f"{_mib(row):.0f}", two_digits(row["memory_ratio"]))
        table.add_row(*names, three_digits(row["training"]["ms"]), two_digits(row["training"]["ratio"]), *cells)
    return [table]


def _inference(record: Record) -> list[Table]:
    config = record["config"]
    title = f"forward in evaluation, width {config['width']:g}, batch {config['batch']}, {_about(record)}"
    table = _table(title, ("network", "operator", "form"), ("ms", "x folded conv"))
    for row in record["results"]:
        found = problem(row)
        table.add_row(row["network"], row["operator"], form(row), *([found] if found else _spread(row["forward"])))
    return [table]


def _spread(result: Row) -> list[str]:
    """Time and ratio, the ratio with its quartiles."""
    ratio = "{:.2f} ({:.2f}-{:.2f})".format(result["ratio"], *result["ratio_quartiles"])
    return [three_digits(result["ms"]), ratio]


def _about(record: Record) -> str:
    return f"{record['config']['dtype']}, {where(record)}"


def _table(title: str, names: Iterable[str], numbers: Iterable[str]) -> Table:
    table = Table(title=title)
    for name in names:
        table.add_column(name, overflow="fold")
    for number in numbers:
        table.add_column(number, justify="right")
    return table


def _by(rows: Iterable[Row], key: str, **wanted: Any) -> dict[str, list[Row]]:
    """The rows that have the wanted entries, by one of their entries."""
    chosen = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    return {value: [row for row in chosen if row[key] == value] for value in dict.fromkeys(row[key] for row in chosen)}


def _own(there: bool, *values: Any) -> list[Any]:
    """The values, where the device has them."""
    return list(values) if there else []


def _memory(record: Record) -> str:
    return "peak, MiB" if record["config"]["device"] == "cuda" else "kept, MiB"


def _mib(row: Row) -> float:
    mib: float = row["peak_mib"] if "peak_mib" in row else row["kept_mib"]
    return mib
