"""The records that there are: of runs, and of folders with records from wherever they were made."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from dcnet.experiments.experiment import Record
from dcnet.files import read_json
from dcnet.training import Run, RunConfig, read_record
from dcnet.training.identity import is_of
from dcnet.training.runs import record_problem

# What a run comes to in the end, be it that it does not converge.
FINAL = ("done", "diverged")
# What tells the record of a run from other JSON.
RUN = {"config", "status", "curves"}


class Known:
    """Records by what was run; two of one config count as one, with the evaluations of both.

    Args:
        runs: the folder of runs.
        folders: with records in files, at any depth, brought from other machines.

    `damaged` has the files of the folders that cannot be read, as of a copy that was cut off, or a record with values
    that are none, and what is wrong with each.
    """

    def __init__(self, runs: Path, folders: Sequence[Path] = ()):
        self.runs = runs
        self.brought: dict[str, Record] = {}
        self.damaged: dict[Path, str] = {}
        for file in _files(folders):
            record = final_record(file)
            if record is not None:
                key = _key(record)
                self.brought[key] = _joined(self.brought.get(key), record)
            elif problem := problem_in(file):
                self.damaged[file] = problem

    def record(self, config: RunConfig) -> Record | None:
        """The record of a config that was run to its end."""
        own = final_record(Run.of(config, self.runs).record_file)
        own = own if own is None or is_of(own, config) else None
        brought = self.brought.get(f"{config.name}-{config.hash}")
        return own if brought is None else _joined(own, brought)


def _files(folders: Sequence[Path]) -> Iterator[Path]:
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"there is no folder {str(folder)!r}: give one with records of runs in it")
        yield from sorted(folder.rglob("*.json"))


def final_record(file: Path) -> Record | None:
    """The record of a run that came to its end; None for another one, or for another file, as that of a benchmark."""
    try:
        record = read_record(file)
    except ValueError:
        return None
    return record if record["status"] in FINAL and {"name", "hash"} <= record.keys() else None


def problem_in(file: Path) -> str | None:
    """What is wrong with a file that is no JSON, or with a record that cannot be used; None for any other JSON."""
    try:
        found = read_json(file)
    except IsADirectoryError:
        return None
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return record_problem(found) if isinstance(found, dict) and found.keys() >= RUN else None


def _key(record: Record) -> str:
    return f"{record['name']}-{record['hash']}"


def _joined(first: Record | None, second: Record) -> Record:
    """The first, with what the second has of evaluations beside; one that is done counts before one that diverged."""
    if first is None or (first["status"], second["status"]) == ("diverged", "done"):
        return second
    found = {**second.get("evaluations", {}), **first.get("evaluations", {})}
    return first | {"evaluations": found} if found else first
