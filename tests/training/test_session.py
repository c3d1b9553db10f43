"""Sessions of several runs: interruptions, errors, progress and summary."""

import dataclasses
import io
import os
import signal

import pytest
from helpers.small_runs import ON_CPU, tiny
from rich.console import Console

from dcnet.exit_codes import BAD_INPUT, INTERRUPTED
from dcnet.training import Run, Trainer, identity, session
from dcnet.training import session as sessions
from dcnet.training.record import Point, Record, Results, Timings
from dcnet.training.session import Session, summary_table

STEPS = 6


def work(root, *configs):
    return [(config, Run.of(config, root)) for config in configs]


def interrupting(monkeypatch, at):
    """Sends Ctrl-C after a step of the first run."""

    class Presses(sessions.ProgressBar):
        pressed = False

        def on_step(self, done, loss, accuracy, images_per_second):
            if done == at and not self.pressed:
                self.pressed = True
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(sessions, "ProgressBar", Presses)


@pytest.mark.parametrize(("at", "status"), [(STEPS - 1, "interrupted"), (STEPS, "done")])
def test_ctrl_c_in_any_step_prevents_the_next_run(tmp_path, monkeypatch, capsys, at, status):
    """In the last step it is too late for this run, but not for the next one."""
    interrupting(monkeypatch, at)
    first, second = work(tmp_path, tiny(), tiny(seed=1))
    assert Session([first, second], ON_CPU).run() == INTERRUPTED
    assert first[1].record().status == status
    assert not second[1].folder.exists()
    assert "1 more run has not started; the same command resumes" in capsys.readouterr().out


def test_an_interrupted_run_with_again_does_not_suggest_the_same_command(tmp_path, monkeypatch, capsys):
    interrupting(monkeypatch, 1)
    assert Session(work(tmp_path, tiny(), tiny(seed=1)), ON_CPU, again=True).run() == INTERRUPTED
    assert "1 more run has not started\n" in capsys.readouterr().out


def test_ctrl_c_in_the_last_step_of_the_last_run_has_no_effect(tmp_path, monkeypatch):
    interrupting(monkeypatch, STEPS)
    assert Session(work(tmp_path, tiny()), ON_CPU).run() == 0


def test_an_ignored_ctrl_c_stays_ignored(tmp_path, monkeypatch):
    """`nohup` and background jobs of shells ignore Ctrl-C."""
    interrupting(monkeypatch, 2)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert Session(work(tmp_path, tiny()), ON_CPU).run() == 0
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_again_keeps_the_old_run_if_the_data_are_missing(tmp_path, monkeypatch, capsys):
    ((config, run),) = work(tmp_path, tiny())
    assert Session([(config, run)], ON_CPU).run() == 0
    weights = run.model_file.read_bytes()

    def missing(name, folder):
        raise ValueError("the data are gone")

    with monkeypatch.context() as patched:
        patched.setattr(identity, "load_dataset", missing)
        assert Session([(config, run)], ON_CPU, again=True).run() == BAD_INPUT
    assert "the data are gone" in capsys.readouterr().err
    assert run.model_file.read_bytes() == weights
    assert run.record().status == "done"
    (run.folder / "old.png").write_text("")
    assert Session([(config, run)], ON_CPU, again=True).run() == 0
    assert run.model_file.read_bytes() == weights
    assert not (run.folder / "old.png").exists()


@pytest.mark.parametrize("name", ["a[/b]", "a[bold]b"])
def test_brackets_in_paths_are_not_markup(tmp_path, capsys, name):
    ((config, run),) = work(tmp_path / name, tiny())
    assert Session([(config, run)], ON_CPU).run() == 0
    assert f"wrote {run.record_file}" in capsys.readouterr().out
    assert Session([(config, run)], ON_CPU).run() == 0
    out = capsys.readouterr().out
    assert f"is already done, see {run.record_file}" in out
    assert "wrote" not in out


def test_an_error_stops_all_runs_of_several_processes(tmp_path, monkeypatch):
    """The other process may still be in the run that failed here."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    session = Session(work(tmp_path, tiny(batch_size=61), tiny()), ON_CPU)
    monkeypatch.delenv("WORLD_SIZE")
    assert session.run() == BAD_INPUT
    assert not session.runs
    alone = Session(work(tmp_path, tiny(batch_size=61), tiny()), ON_CPU)
    assert alone.run() == BAD_INPUT
    assert len(alone.runs) == 1


@pytest.mark.parametrize("width", [80, 140])
def test_a_narrow_terminal_shows_steps_and_time(width):
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    with sessions.ProgressBar(console) as shown:
        shown.on_start("digits-cnn9-small-tanh-cos-seed0", 0, 42_500)
        shown.on_step(40_000, 0.125, 98.0, 12_345.0)
        point = dict.fromkeys((field.name for field in dataclasses.fields(Point)), 0) | {"test_accuracy": 97.5}
        shown.on_evaluation(Point(**point))
        shown.on_step(42_500, 0.125, 98.0, 12_345.0)
    out = console.file.getvalue()
    for words in ("tanh-cos-seed0", "42500/42500", "loss 0.125", "test 97.50 %", "0:00:00"):
        assert words in out
    assert ("images/s" in out) == (width > 100)


@pytest.mark.parametrize("widgets", [True, False])
def test_a_notebook_with_widgets_shows_a_bar(tmp_path, monkeypatch, widgets):
    """Without widgets it shows one line per evaluation: rich would print a warning for every step."""
    monkeypatch.setattr(session, "find_spec", lambda name: name if widgets else None)
    monkeypatch.setattr("rich.live.Live.refresh", lambda live: None)
    console = Console(force_jupyter=True, record=True)
    with sessions.ProgressBar(console) as shown:
        Trainer(tiny(epochs=3), Run.of(tiny(epochs=3), tmp_path), ON_CPU, shown).run()
    assert shown.progress.disable is not widgets
    assert console.export_text().count("step ") == (0 if widgets else 3)


def test_a_log_names_the_run_before_its_lines(tmp_path, capsys):
    configs = [tiny(epochs=1), tiny(epochs=1, operator="conv", adversary="fgsm")]
    assert Session(work(tmp_path, *configs), ON_CPU).run() == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "seed0" in line and not line.startswith("wrote")]
    assert lines == [configs[0].name, f"{configs[1].name}, 3x the passes"]


def test_the_summary_title_has_the_largest_number_of_seeds():
    def record(operator, seed):
        config = tiny(operator=operator, seed=seed).described()
        results = Results(test_accuracy=90.0, train_loss=0.5)
        return Record(config=config, results=results, parameters=1, timings=Timings(total=1.0))

    whole = [record("conv", 0), record("conv", 1), record("tanh-cos", 0), record("tanh-cos", 1)]
    assert str(summary_table(whole).title).endswith("deviation of 2 seeds")
    assert str(summary_table(whole[:3]).title).endswith("deviation of up to 2 seeds")
