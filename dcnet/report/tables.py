"""Records made into the Markdown tables of README and docs."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dcnet.files import write_atomically

Record = dict[str, Any]


def markdown(headings: list[str], rows: list[list[str]]) -> str:
    """A Markdown table whose columns after the first are aligned to the right."""
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def digits(record: Record) -> str:
    """Accuracy of each operator on the digits."""
    config = record["config"]
    rows = [[f"`{name}`", f"{result['parameters']:,}", _spread(result)] for name, result in record["results"].items()]
    about = f"Last of {config['epochs']} epochs, mean ± deviation of {len(config['seeds'])} seeds, one recipe for both:"
    return f"{about}\n\n{markdown(['operator', 'parameters', 'test accuracy, %'], rows)}"


def _spread(result: Record) -> str:
    deviation = result["test_accuracy_deviation"]
    return f"{result['test_accuracy_mean']:.2f}" + ("" if deviation is None else f" ± {deviation:.2f}")


def cpu_layer(record: Record) -> str:
    """Time of each operator's layer against the plain one."""
    config, environment = record["config"], record["environment"]
    rows = [
        [f"`{name}`", f"{found['ms']:.1f}", f"{found['ratio']:.2f}", f"{found['kept_mib']:.0f}"]
        for name, found in record["results"].items()
    ]
    size, kernel = config["size"], config["kernel"]
    shape = f"N{config['batch']} C{config['channels']} {size}x{size}, {kernel}x{kernel}"
    about = f"{shape}, float32, channels last, {config['threads']} threads, torch {environment['torch']}:"
    return f"{about}\n\n{markdown(['operator', 'ms', 'ratio', 'kept for backward, MiB'], rows)}"


def inference_cpu(record: Record) -> str:
    """Time of each network's forward pass, as trained and folded."""
    config = record["config"]
    rows = []
    for network, results in record["results"].items():
        for operator in [name for name in results if f"{name}, folded" in results]:
            trained, folded = results[operator]["ms"], results[f"{operator}, folded"]["ms"]
            rows.append([f"`{network}`, `{operator}`", f"{trained:.1f}", f"{folded:.1f}", f"{folded / trained:.2f}"])
    about = f"Batch {config['batch']}, width {config['width']}, float32, {config['threads']} threads, channels last:"
    return f"{about}\n\n{markdown(['network', 'trained, ms', 'folded, ms', 'ratio'], rows)}"


# Each table stands between its own two marks in one of the files, and is made of the record of the same name.
TABLES: dict[str, Callable[[Record], str]] = {"digits": digits, "cpu_layer": cpu_layer, "inference_cpu": inference_cpu}

FILES = ("README.md", "docs/inference.md")


def fill(text: str, results: Path) -> str:
    """The text with every table made anew from its record."""
    for name, table in TABLES.items():
        text = _put(text, name, table(json.loads((results / f"{name}.json").read_text())))
    return text


def _put(text: str, name: str, table: str) -> str:
    marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    return marks.sub(lambda found: f"{found[1]}\n{table}\n\n{found[2]}", text)


def main() -> None:
    """Writes the tables anew, in the folder that holds README.md, docs/ and results/."""
    for file in FILES:
        write_atomically(file, fill(Path(file).read_text(), Path("results")).encode())


if __name__ == "__main__":
    main()
