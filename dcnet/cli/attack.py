"""`dcnet attack`."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich import progress

from dcnet import report, robustness, training
from dcnet.cli import options
from dcnet.exit_codes import INTERRUPTED
from dcnet.files import write_atomically
from dcnet.terminal import console, print_json, print_line, visible

if TYPE_CHECKING:
    from dcnet.robustness.attack_run import Loaded, RunAttack
    from dcnet.training import Record

PICTURES = ("accuracy", "loss")


@dataclass(frozen=True, kw_only=True)
class Command(options.JsonOption, options.DataOptions, options.OneRun):
    """Attack the network of a run, and report how robust it is and how reliable the result is.

    Measures the accuracy under FGSM, BIM, PGD, AutoAttack, attacks transferred from another run, and corruptions, and
    the epsilon at which the accuracy reaches zero. Checks for masked gradients, and ends with a verdict. Each
    measurement is stored in the record of the run, so that the same command resumes after Ctrl-C.
    """

    source: Annotated[str | None, options.arg("RUN")] = None
    """Transfer attacks from this run, which needs the same classes, such as a plain network."""

    images: options.Number = 1000
    """The number of test images to attack, the same number for each class; all if there are fewer."""

    epsilon: Annotated[str, tyro.conf.arg(metavar="SIZE")] = "8/255"
    """The largest change of each pixel, for pixels in [0, 1]: a number or a fraction."""

    quick: bool = False
    """Use weaker attacks without AutoAttack, which is much faster."""

    report: Annotated[Path | None, options.arg("FILE.md")] = None
    """Write the report card as Markdown, and two pictures next to it."""

    def prepare(self) -> Callable[[], int]:
        epsilon, workers = _epsilon(self.epsilon), self.chosen_workers()
        options.check_at_least(1, "--images", self.images)
        if self.report is not None:
            options.output_file("--report", self.report, (".md",))
            for path in _pictures_beside(self.report):
                options.output_file("--report", path)
        device, run = self.chosen_device(), self.found()
        model, record = options.load_run(run)
        effort = robustness.subject.QUICK if self.quick else robustness.subject.STANDARD
        attack = robustness.attack_run.RunAttack.of(
            (run, model, record), epsilon, self.images, self._source(record), effort, self.data_dir, device, workers
        )
        return options.report_bad_input(lambda: self._run(attack))

    def _source(self, record: Record) -> Loaded | None:
        """Loads the run from which attacks are transferred, if any."""
        if self.source is None:
            return None
        run = training.find_run(self.source, self.root())
        if (other := run.record()).data.classes:
            robustness.attack_run.check_source_run(record, other, run.folder.name)
        return run, *options.load_run(run)

    def _run(self, attack: RunAttack) -> int:
        done = attack.stored_results()
        try:
            with Progress(done) as shown:
                card = attack.measure(done, shown.begins, shown.ends)
        except KeyboardInterrupt:
            stored = "nothing is stored" if attack.not_stored else "the measurements are stored"
            print(f"dcnet: interrupted; {stored}, resume with: {visible(self._again())}", file=sys.stderr)
            return INTERRUPTED
        self._print(attack, card)
        return 0

    def _print(self, attack: RunAttack, card: dict[str, Any]) -> None:
        written = [] if self.report is None else _write(card, self.report, self._again())
        if self.json:
            print_json(card | {"written": [str(path) for path in written]})
            return
        name = visible(f"{card['run']}: {card['network']}")
        print(f"{name}; {card['settings']['images']:,} test images, on {card['device']}")
        tables = report.robustness_report
        for table in (tables.attacks, tables.by_epsilon, tables.corruptions, tables.checks):
            console().print(table(card))
        stored = f"stored in {attack.run.record_file} as {attack.name!r}"
        note = f"note: the card is not stored in the record: {attack.not_stored}" if attack.not_stored else stored
        for line in (*card["verdict"]["words"], note, *(f"wrote {path}" for path in written)):
            print(visible(line))

    def _again(self) -> str:
        """Returns the command, with the options that differ from their defaults."""
        words = ["dcnet", "attack", self.run]
        for option in dataclasses.fields(self):
            name, value = f"--{option.name.replace('_', '-')}", getattr(self, option.name)
            if name != "--run" and value != option.default:
                words += [name] if value is True else [name, str(value)]
        return shlex.join(words)


def _epsilon(text: str) -> float:
    try:
        epsilon = robustness.task.parse_epsilon(text)
    except ValueError as error:
        raise ValueError(f"--{error}") from None
    if not 0 < epsilon <= 1:
        raise ValueError(
            f"--epsilon must be above 0 and at most 1, since pixels are in [0, 1], not {epsilon:g}: write 8/255 for a "
            "change of 8 in pixels up to 255"
        )
    return epsilon


def _pictures_beside(page: Path) -> list[Path]:
    return [page.with_name(f"{page.stem}-{what}.png") for what in PICTURES]


def _write(card: dict[str, Any], page: Path, command: str) -> list[Path]:
    pictures, plots = _pictures_beside(page), report.robustness_report
    for path, draw in zip(pictures, (plots.accuracy_plot, plots.loss_plot), strict=True):
        report.drawing.save(draw(card), path)
    write_atomically(page, plots.page(card, [path.name for path in pictures], command).encode())
    return [page, *pictures]


class Progress:
    """Shows the progress of a report card on stderr: a bar on a terminal, and a line for each measurement."""

    def __init__(self, done: Mapping[str, Any]):
        self.console, self.total = console(stderr=True), len(robustness.report_card.measurements)
        self.known = sum("skipped" not in found for found in done.values())
        columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=None),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
        )
        hidden = not self.console.is_terminal
        self.bar = progress.Progress(*columns, console=self.console, transient=True, disable=hidden)
        self.task = self.bar.add_task("attack", total=self.total, completed=self.known)

    def __enter__(self) -> Progress:
        self.bar.start()
        if self.known:
            print_line(self.console, f"{self.known} of {self.total} measurements are already in the record")
        return self

    def __exit__(self, *_: Any) -> None:
        self.bar.stop()

    def begins(self, name: str) -> None:
        self.bar.update(self.task, description=name.replace("_", " "))

    def ends(self, name: str, found: Mapping[str, Any]) -> None:
        self.bar.advance(self.task)
        # A certificate has both; show its share of certified images.
        share = found.get("certified", found.get("accuracy"))
        result = "done" if share is None else f"{100 * share:.2f} %"
        print_line(self.console, f"{name.replace('_', ' ')}: {found.get('skipped', result)} ({found['seconds']:.1f} s)")
