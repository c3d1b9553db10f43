"""Ctrl-C during the import of torch: the command prints one line; programs that use the library get the exception."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import dcnet
from dcnet import interrupts
from dcnet.cli import app

# Replaces torch: its import prints a line and does not end.
ENDLESS = "import time\nprint('importing', flush=True)\ntime.sleep(100)\n"
# The script that pip installs.
SCRIPT = "import sys\nfrom dcnet.cli.app import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
# Tests in a background job ignore Ctrl-C, and their processes would inherit that.
SWITCHED_ON = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
LIBRARY = "try:\n    import dcnet.layers\nexcept KeyboardInterrupt:\n    print('caught')\n"


def interrupted(folder: Path, *words: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a program that gets Ctrl-C as soon as it starts to import torch."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(ENDLESS)
    paths = [str(folder), str(Path(dcnet.__file__).parents[1])]
    program = subprocess.Popen(
        [sys.executable, "-c", SWITCHED_ON, *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert program.stdout is not None
        assert select.select([program.stdout], [], [], 60)[0], "it does not import torch"
        assert program.stdout.readline() == "importing\n"
        program.send_signal(signal.SIGINT)
        out, errors = program.communicate(timeout=60)
    finally:
        program.kill()
    return program.returncode, out, errors


@pytest.mark.parametrize("words", [["-m", "dcnet"], ["-W", "default", "-m", "dcnet"], ["dcnet"]])
@pytest.mark.parametrize("options", [["train"], ["list", "models"]])
def test_the_command_prints_one_line(words: list[str], options: list[str], tmp_path: Path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "dcnet").write_text(SCRIPT)
    started = words if "-m" in words else [str(tmp_path / "bin" / "dcnet")]
    assert interrupted(tmp_path, *started, *options) == (130, "", "dcnet: interrupted before the end\n")


def test_a_program_that_uses_the_library_gets_the_exception(tmp_path: Path):
    (tmp_path / "program.py").write_text(LIBRARY)
    assert interrupted(tmp_path, "program.py", "dcnet") == (0, "caught\n", "")


def test_the_command_handles_ctrl_c_after_the_import(capsys: pytest.CaptureFixture[str]):
    before = signal.signal(signal.SIGINT, interrupts.end_quietly)
    try:
        assert app.main(["list", "models"]) == 0
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("started", "given", "command"),
    [
        (["python", "/bin/dcnet", "train"], ["/bin/dcnet", "train"], True),
        (["python", "/bin/dcnet.exe"], ["/bin/dcnet.exe"], True),
        (["python", "-m", "dcnet"], ["-m"], True),
        (["python", "-m", "dcnet.report.results"], ["-m"], False),
        (["python", "dcnet.py", "dcnet"], ["dcnet.py", "dcnet"], False),
        (["python", "-c", "import dcnet"], ["-c"], False),
        # Processes of `multiprocessing` have the argv of their parent, but another orig_argv.
        (["python", "-c", "spawn", "--multiprocessing-fork"], ["/bin/dcnet", "train"], False),
        (["python", "-c", "spawn"], ["/bin/dcnet", "train", "--recipe", "digits"], False),
        (["python"], [""], False),
    ],
)
def test_runs_the_command_recognizes_dcnet(
    started: list[str], given: list[str], command: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "orig_argv", started)
    monkeypatch.setattr(sys, "argv", given)
    assert interrupts.runs_the_command() is command


def test_an_ignored_interruption_stays_ignored(monkeypatch: pytest.MonkeyPatch):
    """Shells ignore it in background jobs."""
    monkeypatch.setattr(interrupts, "runs_the_command", lambda: True)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        interrupts.prepare()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
