"""The command line: help, one-line errors, exit codes."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dcnet
from dcnet import cli
from dcnet.cli import app
from dcnet.environment import choose_device


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120)


def help_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        app.main([*arguments])
    assert ended.value.code in (0, None)
    # Compare only the words, since lines depend on the width of the terminal.
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_help_lists_commands(capsys: pytest.CaptureFixture[str]):
    for arguments in ([], ["--help"]):
        text = help_of(capsys, *arguments)
        assert "Decoupled networks for PyTorch." in text
        assert "bench Measure the cost of decoupling on this machine." in text


def test_help_of_the_group_says_what_each_command_does(capsys: pytest.CaptureFixture[str]):
    text = help_of(capsys, "bench", "--help")
    assert "layers Time single layers against torch's, such as nn.Conv2d, forward and forward + backward." in text
    assert "blocks Time blocks of convolution, batch normalization and ReLU, plain and decoupled." in text
    assert "network Time training steps of networks, plain and decoupled." in text
    assert "inference Time networks in evaluation mode, as trained and folded." in text


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("layers", ["device", "operators", "shapes", "dtype", "variants", "check-batch"]),
        ("blocks", ["device", "operators", "shapes", "blocks", "dtype", "check-batch"]),
        ("network", ["device", "model", "operators", "batch", "mode", "precision", "width", "size", "no-fuse"]),
        ("inference", ["device", "networks", "operators", "batch", "dtype", "width", "size", "compile"]),
    ],
)
def test_help_explains_every_option(command: str, options: list[str], capsys: pytest.CaptureFixture[str]):
    text = help_of(capsys, "bench", command, "--help")
    for option in [*options, "repeats", "warmup", "threads", "json", "plot"]:
        assert f"--{option} " in text
    assert "None" not in text
    assert "the exit code is 1" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["layers", "--operators", "tnh-cos"], "unknown magnitude 'tnh': known are sphere, ball, tanh, "),
        (["layers", "--operators", "conv"], "--operators must name an operator other than 'conv'"),
        (["layers", "--operators", "tanh-cos,ball-cos"], "invalid operator 'tanh-cos,ball-cos': unexpected ','"),
        (["layers", "--shapes", "64x32"], "unknown shape '64x32': write N512xC64x32 for 512 images"),
        (["layers", "--shapes", "linear", "M5x3"], "unknown shape 'M5x3': write N512xC64x32 for 512 images"),
        (["layers", "--shapes", "N1xC6x4xG4"], "the groups after G must divide the channels after C, not 'N1xC6x4xG4'"),
        (["layers", "--shapes", "B0xH1xT1xD1"], "numbers of a shape must be 1 or more, not 'B0xH1xT1xD1'"),
        (["layers", "--minutes", "0"], "--minutes must be a number above 0, not 0.0"),
        (["layers", "--repeats", "1"], "--repeats must be 2 or more, not 1"),
        (["layers", "--threads", "0"], "--threads must be 1 or more, not 0"),
        (["layers", "--check-batch", "0"], "--check-batch must be 1 or more, not 0"),
        (["layers", "--plot", "speed.xyz"], "--plot must be a file such as .png or .svg, not 'speed.xyz'"),
        (["blocks", "--blocks", "0"], "--blocks must be 1 or more, not 0"),
        (["blocks", "--check-batch", "0"], "--check-batch must be 1 or more, not 0"),
        (["blocks", "--shapes", "64x32"], "unknown shape '64x32': write N512xC64x32 for 512 images"),
        (["network", "--mode", "graph"], "--mode graph needs cuda, since it is a CUDA graph"),
        (["network", "--model", "vgg"], "unknown network 'vgg': known are cnn9, "),
        (["network", "--width", "0"], "--width must be a number above 0, not 0.0"),
        (["network", "--check-batch", "1"], "--check-batch must be 2 or more, not 1"),
        (["network", "--minutes", "-1"], "--minutes must be a number above 0, not -1.0"),
        (["blocks", "--shapes", "M5x3-4"], "unknown shape 'M5x3-4': write N512xC64x32 for 512 images"),
        (["inference", "--networks", "cnn9", "vgg"], "unknown network 'vgg': known are cnn9, "),
        (["inference", "--batch", "1"], "--batch must be 2 or more, not 1"),
    ],
)
def test_wrong_options_give_a_one_line_error(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert app.main(["bench", arguments[0], "--device", "cpu", *arguments[1:]]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"dcnet: {message}")
    assert error.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("command", ["layers", "blocks", "network", "inference"])
def test_cuda_without_a_gpu_is_rejected(command: str, capsys: pytest.CaptureFixture[str]):
    assert app.main(["bench", command, "--device", "cuda"]) == 2
    assert capsys.readouterr().err == "dcnet: --device is 'cuda', but torch finds no GPU here: use --device cpu\n"


def test_auto_device_uses_the_gpu_if_available(monkeypatch: pytest.MonkeyPatch):
    for there, expected in {True: "cuda", False: "cpu"}.items():
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert choose_device("auto") == expected
        assert choose_device("cpu") == "cpu"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--jsno"], "unknown option '--jsno'; see `dcnet --help`"),
        (["list", "--json"], "unknown option '--json'; see `dcnet list --help`"),
        (["bench"], "give one of blocks, heads, inference, layers, network; see `dcnet bench --help`"),
        (["bench", "layers", "--repeats", "x"], "--repeats must be a whole number, not 'x'; see `dcnet bench layers "),
        (["bench", "layers", "--dtype", "int8"], "--dtype must be one of bfloat16, float16, float32, not 'int8'; see "),
        (["train", "--batch-size", "1.5"], "--batch-size must be a whole number, not '1.5'; see `dcnet train --help`"),
        (["train", "--lr=x"], "--lr must be a number, not 'x'; see"),
        (["train", "--seeds", "0", "b"], "--seeds must be a whole number, not '0 b'; see"),
        (["train", "--norm", "bach"], "--norm must be one of batch, group, layer, none, rms, not 'bach'; see"),
        (["train", "--optimzer", "sgd"], "unknown option '--optimzer': did you mean --optimizer?; see"),
        (["train", "--steps"], "--steps needs a value; see"),
        (["train", "tanh-cos"], "unexpected 'tanh-cos'; see"),
        (["attack"], "give RUN; see `dcnet attack --help`"),
    ],
)
def test_parse_errors_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert app.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"dcnet: {message}")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian", "--epochs", "3"], "unknown command 'trian': known are attack, .*; did you mean 'train'\\?"),
        (["plot", "curve", "RUN"], "unknown plot command 'curve': known are curves, .*; did you mean 'curves'\\?"),
        (["xyz"], "unknown command 'xyz': known are attack, bench, .*, verify"),
    ],
)
def test_unknown_command_gives_a_one_line_error(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main(arguments) == 2
    assert re.fullmatch(f"dcnet: {message}\n", capsys.readouterr().err)


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_version_is_that_of_the_package(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main([option]) == 0
    # The version of the installed package: torch itself adds the build, such as +cu130.
    torch_version = importlib.metadata.version("torch")
    assert capsys.readouterr().out.startswith(f"dcnet {dcnet.__version__} (torch {torch_version}, Python 3.")


@pytest.mark.parametrize("place", ["dcnet.bench.benchmark.Session.run", "dcnet.cli.bench.Layers.prepare"])
def test_an_interruption_ends_in_one_line(
    place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def interrupted(self: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(place, interrupted)
    assert app.main(["bench", "layers", "--device", "cpu"]) == 130
    assert capsys.readouterr().err == "dcnet: interrupted before the end\n"


@pytest.mark.parametrize("words", ["list operators", "bench heads --help"])
def test_closed_pipe_ends_quietly(words: str):
    """As in `dcnet list operators | head -1`: the exit code of a broken pipe, and no message."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        command = [sys.executable, "-m", "dcnet", *words.split()]
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (141, "")


def test_file_name_that_is_too_long_gives_a_one_line_error(capsys: pytest.CaptureFixture[str]):
    assert app.main(["evaluate", "x" * 300]) == 2
    assert capsys.readouterr().err.startswith("dcnet: File name too long: 'xxx")


def test_full_disk_gives_a_one_line_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def full(self: object) -> int:
        raise OSError(28, "No space left on device", "bench.json")

    monkeypatch.setattr("dcnet.bench.benchmark.Session.run", full)
    assert app.main(["bench", "layers", "--device", "cpu"]) == 1
    assert capsys.readouterr().err == "dcnet: No space left on device: 'bench.json'\n"


def test_out_of_memory_gives_a_one_line_error(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """A network whose first filters alone exceed any memory."""
    words = ["train", "--width", "1e13", "--device", "cpu", "--runs", str(tmp_path)]
    assert app.main(words) == 1
    message = capsys.readouterr().err
    assert "dcnet: out of memory; use a smaller batch or a smaller network: " in message
    assert "Traceback" not in message


def test_unexpected_errors_are_not_caught(monkeypatch: pytest.MonkeyPatch):
    def wrong(self: object) -> int:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr("dcnet.bench.benchmark.Session.run", wrong)
    with pytest.raises(RuntimeError, match="shapes differ"):
        app.main(["bench", "layers", "--device", "cpu"])


def test_every_module_is_a_command_or_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    command = (
        "from dataclasses import dataclass\n@dataclass\nclass Command:\n    '''Adds.'''\n    number: int = 1\n"
        "    without_torch = True\n    def prepare(self):\n        return lambda: self.number + 1\n"
    )
    (tmp_path / "add_one.py").write_text(command)
    (tmp_path / "group.py").write_text(f"'''A group.'''\n{command}\nCOMMANDS = {{'add-one': Command}}\n")
    monkeypatch.setattr(cli, "__path__", [*cli.__path__, str(tmp_path)])
    assert app.main(["add-one", "--number", "4"]) == 5
    assert app.main(["group", "add-one", "--number", "4"]) == 5


def test_python_m_dcnet_runs_the_command():
    done = call("-m", "dcnet", "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: dcnet [-h]")


@pytest.mark.parametrize("world", ["2", ""])
def test_main_returns_to_a_program_that_calls_it(world: str):
    """Even in distributed training, where the command `dcnet` ends the process."""
    done = subprocess.run(
        [sys.executable, "-c", "from dcnet.cli.app import main; main(['list', 'margins']); print('continues')"],
        env={**os.environ, "WORLD_SIZE": world},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.endswith("continues\n"), done.stderr


def test_library_does_not_import_the_cli_nor_help_the_plots():
    heavy = "print(sorted({'tyro', 'matplotlib', 'dcnet.cli', 'dcnet.bench'} & set(sys.modules)))"
    assert call("-c", f"import sys, dcnet; {heavy}").stdout == "[]\n"
    shown = "import sys; sys.argv = ['dcnet', 'bench', 'layers', '--help']\nfrom dcnet.cli.app import main\n"
    shown += "try:\n    main()\nexcept SystemExit:\n    print('matplotlib' in sys.modules)"
    assert call("-c", shown).stdout.endswith("False\n")
