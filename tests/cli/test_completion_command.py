"""`dcnet completion`: scripts for bash and zsh."""

import shutil
import subprocess
from pathlib import Path

import pytest
from helpers.cli_runs import call

Capture = pytest.CaptureFixture[str]

# What bash does when Tab is pressed.
PRESS_TAB = """
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
"$(complete -p dcnet | sed 's/.*-F \\([^ ]*\\).*/\\1/')"
echo "${COMPREPLY[@]}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["li"], ["list"]),
        (["list", ""], ["-h", "--help", "datasets", "margins", "models", "operators", "recipes", "runs"]),
        (["plot", "cu"], ["curves"]),
        (["predict", "--in"], ["--invert"]),
        (["evaluate", "--device", "c"], ["cpu", "cuda"]),
    ],
)
def test_bash_completes(words: list[str], expected: list[str], tmp_path: Path, capsys: Capture):
    assert call("completion", "bash") == 0
    (tmp_path / "dcnet").write_text(capsys.readouterr().out)
    command = ["bash", "-c", PRESS_TAB, "bash", str(tmp_path / "dcnet"), "dcnet", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == expected


def test_zsh_has_its_own_script(capsys: Capture):
    assert call("completion", "zsh") == 0
    text = capsys.readouterr().out
    assert text.startswith("#compdef dcnet\n")
    assert "evaluate" in text


def test_unknown_shells_are_rejected_and_help_explains_installation(capsys: Capture):
    assert call("completion", "fish") == 2
    assert capsys.readouterr().err.startswith("dcnet: shell must be one of bash, zsh, not 'fish'; see ")
    with pytest.raises(SystemExit):
        call("completion", "--help")
    assert "dcnet completion bash > ~/.local/share/bash-completion/completions/dcnet" in capsys.readouterr().out
