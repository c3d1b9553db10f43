"""Records made into the Markdown tables of README and docs."""

import json
import re
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

from dcnet.experiments import experiments
from dcnet.files import write_atomically
from dcnet.report import feature_docs, head_tables, speed_tables, training_tables
from dcnet.report.experiments import docs_table
from dcnet.spec import unknown

Record = dict[str, Any]


# Each table stands between its own two marks in one of the files, and is made of the record of the same name, or of all
# the records in the folder of that name.
TABLES: dict[str, Callable[[Any], str]] = {
    "digits": training_tables.digits,
    "layers_cpu": speed_tables.layers_cpu,
    "layers_cuda": speed_tables.layers_cuda,
    "network_cuda": speed_tables.network,
    "inference_cpu": speed_tables.inference,
    "inference_cuda": speed_tables.inference,
    "int8_cpu": speed_tables.int8,
    "heads_cpu": head_tables.heads,
    "heads_cuda": head_tables.heads,
    "features": feature_docs.features,
}

FILES = (
    "README.md",
    "docs/benchmarks.md",
    "docs/choosing.md",
    "docs/inference.md",
    "docs/losses.md",
    "docs/results.md",
    "docs/robustness.md",
    "docs/verification.md",
)


MARK = re.compile(r"^ *<!-- (/?)(\w+) -->", re.MULTILINE)


def fill(text: str, results: Path) -> str:
    """The text with every table made anew whose record is there; marks that have no table between them are an error."""
    _check_marks(text)
    for name, table in TABLES.items():
        file, folder = results / f"{name}.json", results / name
        if file.exists():
            text = _put(text, name, table(_read(file)))
        elif folder.is_dir():
            text = _put(text, name, table([_read(path) for path in sorted(folder.glob("*.json"))]))
    # An experiment stands between marks of its name, with whatever there is of it.
    for name in re.findall(r"<!-- (\w+) -->\n", text):
        if name in experiments and name not in TABLES:
            text = _put(text, name, docs_table(name, results))
    return text


def _read(file: Path) -> Record:
    record: Record = json.loads(file.read_text(encoding="utf-8"))
    if not record.get("complete", record.get("status", "done") == "done"):
        raise ValueError(f"{str(file)!r} is the record of a run that was interrupted: run it to the end")
    return record


def _check_marks(text: str) -> None:
    """Each pair is closed before the next, and has a name that there are tables of: else one would stay as it was."""
    marks = MARK.findall(text)
    for (slash, name), after in zip_longest(marks[::2], marks[1::2]):
        if name not in TABLES and name not in experiments:
            raise unknown("table in a mark", name, [*TABLES, *experiments])
        if slash:
            raise ValueError(f"the mark <!-- /{name} --> has no <!-- {name} --> before it")
        if after != ("/", name):
            raise ValueError(f"the mark <!-- {name} --> has no <!-- /{name} --> after it")


def _put(text: str, name: str, table: str) -> str:
    marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    return marks.sub(lambda found: f"{found[1]}\n{table}\n\n{found[2]}", text)


def main() -> None:
    """Writes the tables anew, in the folder that holds README.md, docs/ and results/."""
    for file in FILES:
        write_atomically(file, fill(Path(file).read_text(encoding="utf-8"), Path("results")).encode())


if __name__ == "__main__":
    main()
