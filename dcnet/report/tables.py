"""Records made into the Markdown tables of README and docs."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dcnet.files import write_atomically
from dcnet.report import speed_tables
from dcnet.report.markdown import markdown

Record = dict[str, Any]


def digits(record: Record) -> str:
    """Accuracy of each operator on the digits."""
    config = record["config"]
    rows = [[f"`{name}`", f"{result['parameters']:,}", _spread(result)] for name, result in record["results"].items()]
    about = f"Last of {config['epochs']} epochs, mean ± deviation of {len(config['seeds'])} seeds, one recipe for both:"
    return f"{about}\n\n{markdown(['operator', 'parameters', 'test accuracy, %'], rows)}"


def _spread(result: Record) -> str:
    deviation = result["test_accuracy_deviation"]
    return f"{result['test_accuracy_mean']:.2f}" + ("" if deviation is None else f" ± {deviation:.2f}")


# Each table stands between its own two marks in one of the files, and is made of the record of the same name.
TABLES: dict[str, Callable[[Record], str]] = {
    "digits": digits,
    "layers_cpu": speed_tables.layers_cpu,
    "layers_cuda": speed_tables.layers_cuda,
    "network_cuda": speed_tables.network,
    "inference_cpu": speed_tables.inference,
    "inference_cuda": speed_tables.inference,
}

FILES = ("README.md", "docs/benchmarks.md", "docs/inference.md")


def fill(text: str, results: Path) -> str:
    """The text with every table made anew whose record is there."""
    for name, table in TABLES.items():
        file = results / f"{name}.json"
        if file.exists():
            text = _put(text, name, table(_complete(json.loads(file.read_text()), file)))
    return text


def _complete(record: Record, file: Path) -> Record:
    if not record.get("complete", True):
        raise ValueError(f"{str(file)!r} is the record of a run that was interrupted: run it to the end")
    return record


def _put(text: str, name: str, table: str) -> str:
    marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    return marks.sub(lambda found: f"{found[1]}\n{table}\n\n{found[2]}", text)


def main() -> None:
    """Writes the tables anew, in the folder that holds README.md, docs/ and results/."""
    for file in FILES:
        write_atomically(file, fill(Path(file).read_text(), Path("results")).encode())


if __name__ == "__main__":
    main()
