"""The script for GPUs, with small stages on the CPU."""

import importlib.util
import re
import shlex
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from dcnet.cli.app import parse

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/gpu_check.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _same_signals():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def stage(script, name, code, seconds=60.0):
    return script.Stage(name, seconds, ("-c", code))


def test_stages_run_in_turn_and_are_summarized(script, tmp_path, capsys):
    stages = (stage(script, "first", "print('one')"), stage(script, "second", "print('two'); raise SystemExit(3)"))
    out = tmp_path / "out"
    assert script.main(["--out", str(out)], stages) == 1
    summary = (out / "summary.txt").read_text()
    assert re.fullmatch(r"first +\d+ s  exit code 0\n    one\nsecond +\d+ s  exit code 3\n    two\n", summary)
    assert capsys.readouterr().out.endswith(summary)
    assert (out / "second.log").read_text() == "two\n"
    assert script.main(["--out", str(out), "--only", "first"], stages) == 0
    assert "second" not in (out / "summary.txt").read_text()


def test_a_stage_ends_with_all_its_processes_at_its_limit(script, tmp_path):
    """The child of a stage would write a file after its end; what a process was asked to write by a signal counts."""
    late, asked = tmp_path / "late", tmp_path / "asked"
    child = f"import time; time.sleep(4); open({str(late)!r}, 'w')"
    code = (
        "import signal, subprocess, sys, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: (open({str(asked)!r}, 'w'), sys.exit()))\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        "print('started', flush=True)\n"
        "time.sleep(60)\n"
    )
    started = time.monotonic()
    stages = (stage(script, "slow", code, 2.0), stage(script, "next", "print('done')"))
    assert script.main(["--out", str(tmp_path)], stages) == 1
    assert time.monotonic() - started < 30
    summary = (tmp_path / "summary.txt").read_text()
    assert "stopped after its limit of 2 s\n    started\n" in summary
    assert "exit code 0\n    done" in summary
    assert asked.exists()
    time.sleep(4)
    assert not late.exists()


def test_no_stage_takes_more_than_the_time_left_or_starts_with_too_little(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "LEAST_TIME", 2.0)
    stages = (stage(script, "long", "import time; time.sleep(60)"), stage(script, "other", ""))
    assert script.main(["--out", str(tmp_path), "--minutes", "0.05"], stages) == 1
    summary = (tmp_path / "summary.txt").read_text()
    assert "stopped after its limit of 3 s" in summary
    assert re.search(r"other +0 s  not run: no time was left", summary)
    # A stage that needs less than the least time is run.
    monkeypatch.setattr(script, "LEAST_TIME", 60.0)
    stages = (stage(script, "long", ""), stage(script, "short", "", 20.0))
    assert script.main(["--out", str(tmp_path), "--minutes", "0.5"], stages) == 1
    assert re.search(r"long .*not run.*\nshort .*exit code 0", (tmp_path / "summary.txt").read_text())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_with_the_summary(number, tmp_path):
    """Also after the signal by which schedulers end a program; the stage does not go on."""
    marker = tmp_path / "running"
    code = f"import time; open({str(marker)!r}, 'w'); print('begun', flush=True); time.sleep(60)"
    call = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import gpu_check as g; "
        f"stages = (g.Stage('long', 60, ('-c', {code!r})), g.Stage('other', 60, ('-c', ''))); "
        f"sys.exit(g.main(['--out', {str(tmp_path)!r}], stages))"
    )
    process = subprocess.Popen([sys.executable, "-c", call], stdout=subprocess.PIPE, text=True)
    while not marker.exists():
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(number)
    printed = process.communicate(timeout=30)[0]
    assert process.returncode == 130
    assert re.search(r"long +\d+ s  interrupted\n    begun\n$", printed)


def test_wheels_can_be_imported(script, tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "some_package-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("some_package/__init__.py", "NAME = 'from a wheel'")
    stages = (stage(script, "some", "import some_package, dcnet; print(some_package.NAME)"),)
    assert script.main(["--out", str(tmp_path / "out"), "--wheels", str(wheels)], stages) == 0
    assert "    from a wheel\n" in (tmp_path / "out/summary.txt").read_text()


@pytest.mark.parametrize("workers", [(), ("{workers}",)])
def test_tests_are_counted_and_those_that_failed_are_named(script, tmp_path, workers, monkeypatch):
    monkeypatch.setattr(script, "MAX_WORKERS", 2)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_some.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('x', ['a b', 'c'])\n"
        "def test_one(x): assert x == 'c'\n"
        "@pytest.fixture\n"
        "def broken(): raise ValueError\n"
        "def test_two(broken): pass\n"
        "def test_three(): pytest.skip()\n"
    )
    (made,) = [one for one in script.STAGES if one.name == "tests-heads"]
    files = ("tests/test_some.py",)
    command = tuple(word for word in made.command[:-1] if word != "{workers}") + workers + files
    script.main(["--out", str(tmp_path / "out")], (script.Stage("tests-some", 120, command),))
    lines = (tmp_path / "out/summary.txt").read_text().splitlines()
    assert lines[1] == "    1 passed, 2 failed"
    assert sorted(lines[2:]) == [
        "    ERROR tests/test_some.py::test_two", "    FAILED tests/test_some.py::test_one[a b]"
    ]  # fmt: skip


def test_the_stages_have_every_test_for_gpus_once_and_valid_commands(script):
    files = [word for one in script.STAGES for word in one.command if word.startswith("tests/")]
    assert len(files) == len(set(files))
    kernels = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests/kernels").glob("test_*.py")}
    needing = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"skipif\(not torch\.cuda\.is_available|needs a GPU", path.read_text()) and path != Path(__file__)
    }
    assert kernels | needing <= set(files)
    assert all((ROOT / file).is_file() for file in files)
    names = [one.name for one in script.STAGES]
    assert len(names) == len(set(names))
    for one in script.STAGES:
        if one.name.startswith("bench-"):
            words = script.command_of(one, Path("out"), 60, {})
            assert words[2:4] == ["dcnet", "bench"]
            command = parse(words[3:])
            assert str(command.json).endswith("_cuda.json"), shlex.join(words)


def test_list_and_errors(script, capsys, tmp_path):
    assert script.main(["--list", "--only", "bench-heads", "tests-heads"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["tests-heads", "bench-heads"]
    for words, problem in (
        ([], "--out is missing"),
        (["--out", "x", "--only", "none"], "invalid choice: 'none'"),
        (["--out", "x", "--wheels", str(tmp_path / "none")], "--wheels: there is no folder"),
    ):
        with pytest.raises(SystemExit):
            script.main(words)
        assert problem in capsys.readouterr().err
