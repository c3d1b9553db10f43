"""Tables of layers of every kind (linear, convolution, attention), compared with torch's plain layers."""

from collections.abc import Sequence

from dcnet.operator import PLAIN
from dcnet.report.speed_cells import (
    Record,
    Row,
    matches,
    place,
    problem,
    spell,
    three_digits,
    twin_of,
    two_digits,
    unique,
    without_empty,
)
from dcnet.report.speed_tables import PLAIN_COMPILED, VARIANTS
from dcnet.table import Column, Table

# The kinds of layers, by the name of torch's.
KINDS = {
    "nn.Linear": "Linear layers",
    "nn.Conv1d": "Convolutions of sequences",
    "nn.Conv2d": "Convolutions of images",
    "nn.Conv3d": "Convolutions of volumes",
    "scaled_dot_product_attention": "Attention",
}
ON_GPU = ("from host", "launches")


def twins(record: Record) -> str:
    """Returns a table per kind of layer: time and ratios of each shape and operator, compared with the plain layer."""
    tables = [table.markdown_section() for table in twin_tables(record)]
    found, timed = _kinds(record["results"]), _kinds([row for row in record["results"] if not row.get("skipped")])
    missing = ", ".join(f"`{twin}`" for twin in KINDS if twin in found and twin not in timed)
    return "\n\n".join([*tables, f"Not timed in this record: {missing}."] if missing else tables)


def twin_tables(record: Record) -> list[Table]:
    """Returns a table for each kind of layer of which at least one was timed."""
    timed = _kinds([row for row in record["results"] if not row.get("skipped")])
    return [_table(record, twin) for twin in KINDS if twin in timed]


def _kinds(results: Sequence[Row]) -> set[str]:
    return {twin_of(row["shape"]) for row in results}


def _table(record: Record, twin: str) -> Table:
    results = [row for row in record["results"] if twin_of(row["shape"]) == twin]
    forms = [row for row in results if row["variant"] not in (PLAIN, PLAIN_COMPILED)]
    # All forms of a pair that was skipped have the same reason, which is a note.
    rows = [_cells(row, results) for row in forms if not row.get("skipped")]
    columns = [Column("shape"), Column("operator", code=True), Column("form")]
    headings = ("plain, ms", "decoupled, ms", "ratio", "forward", *ON_GPU, "memory")
    columns += [Column(heading, "right") for heading in headings]
    clock = ", by CUDA graphs" if record["config"]["device"] == "cuda" else ""
    title = f"{KINDS[twin]}, forward and backward, compared with `{twin}`{clock}, {record['config']['dtype']}"
    notes = [f"{_sentence(text)}." for text in unique([row for row in forms if row.get("skipped")], "skipped")]
    table = Table(columns, rows, f"{title}, {place(record)}", notes)
    for heading in ON_GPU:
        table = without_empty(table, heading)
    return table


def _sentence(text: str) -> str:
    operator, _, rest = text.partition(" at ")
    shape, _, rest = rest.partition(" ")
    return f"`{operator}` at {spell(shape)} {rest}"


def _cells(row: Row, results: Sequence[Row]) -> list[str]:
    named = [spell(row["shape"]), row["operator"], VARIANTS[row["variant"]]]
    compiled = row["variant"].endswith("compiled")
    same = {"shape": row["shape"], "operator": row["operator"]}
    plain = [one for one in results if matches(one, **same, variant=PLAIN_COMPILED if compiled else PLAIN)]
    if found := problem(row) or problem(plain[0]):
        return [*named, *[found] * 3, "", "", "", ""]
    training = row["training"]
    times = [three_digits(one["training"]["ms"]) for one in (plain[0], row)]
    ratios = [training["ratio"], row["forward"]["ratio"], training.get("host_ratio"), training.get("launches_ratio")]
    return [*named, *times, *map(two_digits, (*ratios, row.get("memory_ratio")))]
