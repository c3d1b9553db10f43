"""Updates the tables and pictures of README and docs from the records; `make results` fails if any was stale."""

import io
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from dcnet.experiments import experiments
from dcnet.experiments.status import RecordIndex
from dcnet.files import write_atomically
from dcnet.registry import unknown_name
from dcnet.report import feature_plots, listing, network_tables, speed_tables, twin_tables
from dcnet.report.curves import run_curves
from dcnet.report.drawing import DPI
from dcnet.report.experiment_tables import docs_table
from dcnet.report.figures import convergence_records, shade_errors, shade_plot
from dcnet.report.operator_plots import geometry, margin_curves, operator_curves
from dcnet.report.speed_plots import benchmark_plot
from dcnet.table import Table
from dcnet.training import Record, read_record
from dcnet.training.session import format_mean, group_by_seed

RESULTS, IMAGES = Path("results"), Path("docs/images")
# Pictures count as equal if no pixel differs by more than this (of 255), since processors round differently.
SHADE = 8

# Pictures of benchmarks by file name, with the names of their records.
BENCHMARKS = {"speed_cuda.png": "layers_cuda", "heads_cpu.png": "heads_cpu", "heads_cuda.png": "heads_cuda"}


def digits(found: Sequence[dict[str, Any]]) -> str:
    """Returns the table of accuracies on the digits by operator."""
    records = [Record.from_json(values) for values in found]
    rows = []
    for members in group_by_seed(records).values():
        accuracies = [record.results.get("test_accuracy") for record in members if record.results]
        rows.append([members[0].config["operator"], f"{members[0].parameters:,}", format_mean(accuracies)])
    config, seeds = records[0].config, len({record.config["seed"] for record in records})
    title = f"`{config['model']}`, last of {config['epochs']} epochs, mean ± deviation of {seeds} seeds, one recipe"
    headings = ["operator", "parameters", "test accuracy, %"]
    return Table.of_rows(headings, rows, code=["operator"], title=title).markdown_section()


# A table is inserted between the marks <!-- name --> and <!-- /name --> of a file. It is made from the record
# name.json, or from all records in the folder of that name.
TABLES: dict[str, Callable[[Any], str]] = {
    "digits": digits,
    "layers_cpu": speed_tables.layers_cpu,
    "layers_cuda": speed_tables.layers_cuda,
    "twins_cpu": twin_tables.twins,
    "twins_cuda": twin_tables.twins,
    "linear_cuda": twin_tables.twins,
    "one_layer_cuda": speed_tables.layers_cuda,
    "blocks_cuda": speed_tables.blocks,
    "network_cuda": network_tables.network,
    "timm_cuda": network_tables.network,
    "inference_cpu": network_tables.inference,
    "inference_cuda": network_tables.inference,
    "int8_cpu": network_tables.int8,
    "heads_cpu": speed_tables.heads,
    "heads_cuda": speed_tables.heads,
    "fused_heads_cuda": speed_tables.heads_alone,
    "features": feature_plots.features,
}

FILES = (
    "README.md",
    "docs/benchmarks.md",
    "docs/choosing.md",
    "docs/inference.md",
    "docs/losses.md",
    "docs/results.md",
    "docs/robustness.md",
    "docs/transformers.md",
    "docs/verification.md",
)


MARK = re.compile(r"^ *<!-- (/?)(\w+) -->", re.MULTILINE)


def fill(text: str, results: Path) -> str:
    """Returns the text with updated tables; tables without a record stay. Raises ValueError if marks do not match."""
    _check_marks(text)
    for name, table in TABLES.items():
        file, folder = results / f"{name}.json", results / name
        if file.exists():
            text = _put(text, name, table(_read_final(file)))
        elif folder.is_dir():
            text = _put(text, name, table([_read_final(path) for path in sorted(folder.glob("*.json"))]))
    # Tables of experiments are between marks with the name of the experiment.
    for name in re.findall(r"<!-- (\w+) -->\n", text):
        if name in experiments and name not in TABLES:
            text = _put(text, name, docs_table(name, results))
    return text


def _read_final(file: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if not record.get("complete", record.get("status", "done") == "done"):
        raise ValueError(f"{str(file)!r} is the record of an unfinished run: resume it")
    return record


def _check_marks(text: str) -> None:
    """Raises ValueError for an unknown name, or for marks that are not in pairs."""
    marks = MARK.findall(text)
    for (slash, name), after in zip_longest(marks[::2], marks[1::2]):
        if name not in TABLES and name not in experiments:
            raise unknown_name("table in a mark", name, [*TABLES, *experiments])
        if slash:
            raise ValueError(f"the mark <!-- /{name} --> has no <!-- {name} --> before it")
        if after != ("/", name):
            raise ValueError(f"the mark <!-- {name} --> has no <!-- /{name} --> after it")


def _put(text: str, name: str, table: str) -> str:
    marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    return marks.sub(lambda found: f"{found[1]}\n{table}\n\n{found[2]}", text)


def main() -> int:
    """Updates stale files and prints their names. Returns 1 if any was stale, 2 after an error, else 0."""
    try:
        return _update()
    except (FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2


def _update() -> int:
    stale = [file for file in FILES if _text(Path(file))]
    stale += [str(listing.STORED)] if listing.store_operators() else []
    stale += [str(IMAGES / name) for name, figure in pictures() if _picture(IMAGES / name, figure)]
    for file in stale:
        print(f"{file} was stale and has been updated", file=sys.stderr)
    return 1 if stale else 0


def pictures() -> Iterator[tuple[str, Figure]]:
    """Yields the pictures of the docs that have records, with their file names."""
    yield "operators.png", operator_curves()
    yield "geometry.png", geometry()
    yield "margins.png", margin_curves([], 4.0)
    digits = sorted((RESULTS / "digits").glob("*.json"))
    if digits:
        yield "curves.png", run_curves([read_record(file) for file in digits])
    known = RecordIndex(RESULTS / "no runs", [RESULTS])
    if converging := convergence_records(known):
        yield "figure4.png", run_curves(converging)
    if shaded := shade_errors(known):
        yield "shade.png", shade_plot(shaded)
    for name, record in BENCHMARKS.items():
        file = RESULTS / f"{record}.json"
        if file.exists():
            yield name, benchmark_plot(_read_final(file))
    yield from feature_plots.pictures(RESULTS).items()


def _text(file: Path) -> bool:
    """Updates the tables in a file; returns whether any was stale."""
    before = file.read_text(encoding="utf-8")
    try:
        after = fill(before, RESULTS)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    if after != before:
        write_atomically(file, after.encode())
    return after != before


def _picture(file: Path, figure: Figure) -> bool:
    """Updates a picture; returns whether it was missing or stale."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=DPI)
    if file.exists() and same_picture(file.read_bytes(), content.getvalue()):
        return False
    write_atomically(file, content.getvalue())
    return True


def same_picture(first: bytes, second: bytes) -> bool:
    """Whether two PNG files look the same, up to small differences in shade."""
    one, other = (np.asarray(Image.open(io.BytesIO(part)).convert("RGBA"), dtype=np.int16) for part in (first, second))
    return one.shape == other.shape and bool((np.abs(one - other) <= SHADE).all())


if __name__ == "__main__":
    sys.exit(main())
