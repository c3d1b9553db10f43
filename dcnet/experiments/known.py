"""The records that there are: of runs, and of folders with records from wherever they were made."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from dcnet.experiments.experiment import Record
from dcnet.files import read_json
from dcnet.training import Run, RunConfig, read_record

# What a run comes to in the end, be it that it does not converge.
FINAL = ("done", "diverged")


class Known:
    """Records by what was run; two of one config count as one, with the evaluations of both.

    Args:
        runs: the folder of runs.
        folders: with records in files, at any depth, brought from other machines.

    `damaged` has the files of the folders that nobody can read, as of a copy that was cut off.
    """

    def __init__(self, runs: Path, folders: Sequence[Path] = ()):
        self.runs = runs
        self.brought: dict[str, Record] = {}
        self.damaged: list[Path] = []
        for file in _files(folders):
            record = final_record(file)
            if record is not None:
                key = _key(record)
                self.brought[key] = _joined(self.brought.get(key), record)
            elif not _is_json(file):
                self.damaged.append(file)

    def record(self, config: RunConfig) -> Record | None:
        """The record of a config that was run to its end."""
        own = final_record(Run.of(config, self.runs).record_file)
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


def _is_json(file: Path) -> bool:
    """Whether it can be read, be it something else than a record; a folder of such a name is nothing to read."""
    try:
        read_json(file)
    except IsADirectoryError:
        return True
    except (OSError, ValueError):
        return False
    return True


def _key(record: Record) -> str:
    return f"{record['name']}-{record['hash']}"


def _joined(first: Record | None, second: Record) -> Record:
    """The first, with what the second has of evaluations beside; one that is done counts before one that diverged."""
    if first is None or (first["status"], second["status"]) == ("diverged", "done"):
        return second
    found = {**second.get("evaluations", {}), **first.get("evaluations", {})}
    return first | {"evaluations": found} if found else first
