"""Tables of benchmark records of networks: training steps, inference, and the fastest way to run each network."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcnet.operator import PLAIN
from dcnet.report.speed_cells import (
    Record,
    Row,
    form,
    matches,
    memory_heading,
    mib_of,
    place,
    problem,
    setting,
    three_digits,
    two_digits,
    without_empty,
)
from dcnet.table import Column, Table

X_COMPILED, X_FOLDED_COMPILED = "x plain compiled", "x plain folded compiled"


@dataclass(frozen=True)
class Ways:
    """The ways to run a network that a benchmark compares.

    Attributes:
        group: networks are compared if they have the same values of these keys.
        entry: the key of the times.
        name: the name of the way of a row.
        compiled: the values of the compiled plain network.
    """

    group: tuple[str, ...]
    entry: str
    name: Callable[[Row], str]
    compiled: Mapping[str, Any]

    def x_compiled(self, row: Row, rows: Sequence[Row]) -> float | None:
        """The time relative to the compiled plain network of the same group; None if either was not timed."""
        wanted = {**{key: row[key] for key in self.group}, "operator": PLAIN, **self.compiled}
        base = [self._ms(one) for one in self._timed(rows) if matches(one, **wanted)]
        return self._ms(row) / base[0] if base and self._timed([row]) else None

    def fastest(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """The fastest way of each decoupled network and of its plain twin, and all ratios to the compiled twin."""
        found = []
        keys = (*self.group, "operator")
        for values in dict.fromkeys(tuple(row[key] for key in keys) for row in rows):
            names = dict(zip(keys, values, strict=True))
            own = [row for row in self._timed(rows) if matches(row, **names)]
            plain = [row for row in self._timed(rows) if matches(row, **names | {"operator": PLAIN})]
            if names["operator"] != PLAIN and own and plain:
                best, other = min(own, key=self._ms), min(plain, key=self._ms)
                times = {"decoupled": self._best(best), "plain": self._best(other)}
                ratios = {self.name(row): self.x_compiled(row, rows) for row in own}
                found.append({**names, **times, "ratio": self._ms(best) / self._ms(other), "x_plain_compiled": ratios})
        return found

    def notes(self, rows: Sequence[Row], about: Callable[[Row], str]) -> list[str]:
        """A sentence for each entry of `fastest`; `about` describes its group."""
        return [
            f"Fastest of both: {about(found)}: {_spoken(found['operator'], found['decoupled'])} and "
            f"{_spoken('plain', found['plain'])}, ratio {two_digits(found['ratio'])}."
            f"{'' if any(found['x_plain_compiled'].values()) else ' The compiled plain network was not timed.'}"
            for found in self.fastest(rows)
        ]

    def _timed(self, rows: Sequence[Row]) -> list[Row]:
        return [row for row in rows if "ms" in row.get(self.entry, {}) and not problem(row)]

    def _ms(self, row: Row) -> float:
        ms: float = row[self.entry]["ms"]
        return ms

    def _best(self, row: Row) -> dict[str, Any]:
        return {"mode": self.name(row), "ms": self._ms(row)}


def _spoken(who: str, best: Row) -> str:
    return f"{three_digits(best['ms'])} ms ({who}, {best['mode']})"


STEPS = Ways(("model", "batch"), "training", lambda row: str(row["mode"]), {"mode": "compile"})
FORWARD = Ways(("network",), "forward", form, {"folded": True, "compiled": True})


def network(record: Record) -> str:
    """Returns the table of training steps, of decoupled networks compared with the plain one."""
    return network_table(record).markdown_section()


def network_names(record: Record) -> list[str]:
    """Returns the names of the networks of a record of training steps; earlier records have one."""
    config = record["config"]
    return list(config["models"]) if "models" in config else [config["model"]]


def network_table(record: Record) -> Table:
    several, rows = len(network_names(record)) > 1, list(_network_rows(record["results"]))
    columns = [
        Column("network", wraps=True, code=True),
        Column("operator", wraps=True, code=True),
        Column("batch", "right"),
        Column("mode"),
        *(Column(name, "right") for name in ("plain, ms", "decoupled, ms", "ratio", X_COMPILED, "images/s")),
        Column(memory_heading(record), "right", detail=True),
        Column("memory", "right"),
    ]
    if not several:
        columns, rows = columns[1:], [row[1:] for row in rows]
    notes = STEPS.notes(record["results"], lambda row: f"{row['model']}, " * several + f"batch {row['batch']}")
    notes += _skipped(record["results"])
    return without_empty(Table(columns, rows, _network_title(record), notes), X_COMPILED)


def _network_title(record: Record) -> str:
    config, names = record["config"], network_names(record)
    unfused = "" if config.get("fuse", True) else ", not fused"
    what = f"Training step of {names[0]}" if len(names) == 1 else "Training step"
    size = f", {config['size']}x{config['size']} pixels" if "models" in config else ""
    return f"{what}, width {config['width']:g}{size}, {config['precision']}{unfused}, {place(record)}"


def _skipped(results: Sequence[Row]) -> list[str]:
    """Returns a sentence that names all skipped networks, if there are any."""
    found: dict[str, dict[str, None]] = {}
    for row in results:
        if row.get("skipped"):
            found.setdefault(f"{row['mode']}, batch {row['batch']}", {})[row["model"]] = None
    parts = [f"{', '.join(names)} ({how})" for how, names in found.items()]
    return [f"Not timed: {'; '.join(parts)}."] if parts else []


def _network_rows(results: Sequence[Row]) -> Iterator[list[str]]:
    for row in [row for row in results if row["operator"] != PLAIN and not row.get("skipped")]:
        same = {"operator": PLAIN, **{key: row[key] for key in ("model", "mode", "batch")}}
        (plain,) = [base for base in results if matches(base, **same)]
        cells = _network_cells(row, plain, STEPS.x_compiled(row, results))
        yield [row["model"], row["operator"], str(row["batch"]), row["mode"], *cells]


def _network_cells(row: Row, plain: Row, x_compiled: float | None) -> list[str]:
    if found := problem(row) or problem(plain):
        return [found] * 3 + [""] + [found] * 3
    times = [three_digits(entry["training"]["ms"]) for entry in (plain, row)]
    ratios = [two_digits(ratio) for ratio in (row["training"]["ratio"], x_compiled)]
    return [*times, *ratios, f"{row['images_per_s']:,.0f}", f"{mib_of(row):.0f}", two_digits(row["memory_ratio"])]


def inference(record: Record) -> str:
    """Returns the table of forward passes in evaluation, of trained and folded networks."""
    return inference_table(record).markdown_section()


def inference_table(record: Record) -> Table:
    config, rows = record["config"], list(_inference_rows(record["results"]))
    ratios = ("folded / trained", "folded / folded plain", X_FOLDED_COMPILED)
    columns = [
        Column("network", wraps=True, code=True),
        Column("operator", wraps=True, code=True),
        Column("mode"),
        *(Column(name, "right") for name in ("trained, ms", "folded, ms", *ratios)),
        Column("quartiles", "right", detail=True),
    ]
    title = f"Forward pass in evaluation, batch {config['batch']}, width {config['width']:g}{setting(record)}"
    # Without compiled networks, the table shows it already.
    compiled = any(row["compiled"] for row in record["results"])
    notes = FORWARD.notes(record["results"], lambda row: str(row["network"])) if compiled else []
    return without_empty(Table(columns, rows, title, notes), X_FOLDED_COMPILED)


def _inference_rows(results: Sequence[Row]) -> Iterator[list[str]]:
    for trained in [row for row in results if not row["folded"]]:
        same = {name: trained[name] for name in ("network", "operator", "compiled")}
        (folded,) = [row for row in results if matches(row, **same, folded=True)]
        plain = [row for row in results if matches(row, **same | {"operator": PLAIN}, folded=True)]
        cells = _folding_cells(trained, folded, plain[0], FORWARD.x_compiled(folded, results))
        mode = "compiled" if trained["compiled"] else "eager"
        yield [trained["network"], trained["operator"], mode, *cells]


def _folding_cells(trained: Row, folded: Row, plain: Row, x_compiled: float | None) -> list[str]:
    """Returns times and ratios; a compiled network is compared with the compiled plain one.

    Otherwise, the ratio is to the plain network that was timed in turns with it.
    """
    if found := problem(trained) or problem(folded) or problem(plain):
        return [found] * 4 + ["", ""]
    times = trained["forward"]["ms"], folded["forward"]["ms"]
    beside = times[1] / plain["forward"]["ms"] if folded["compiled"] else folded["forward"]["ratio"]
    quartiles = "-".join(map(two_digits, folded["forward"].get("ratio_quartiles", ())))
    ratios = map(two_digits, (times[1] / times[0], beside, x_compiled))
    return [*map(three_digits, times), *ratios, quartiles]


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
