"""The command line: parses arguments, runs the command, and returns an exit code.

Every module of this package except this one and `options` is a command, or a group of commands. Only the chosen one is
imported, and torch only after its options are parsed.
"""

import argparse
import importlib
import os
import pkgutil
import platform
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from types import ModuleType
from typing import Protocol

import tyro
from tyro.extras import SubcommandApp

import dcnet
from dcnet import bench, cli, report
from dcnet.exit_codes import BAD_INPUT, FAILED, INTERRUPTED, OUTPUT_CLOSED
from dcnet.files import sentence_of
from dcnet.interrupts import MESSAGE, end_process, leave_to_the_command
from dcnet.registry import unknown_name
from dcnet.terminal import discard, prepare_streams, visible

NO_COMMANDS = ("app", "options")
CONFIG = (tyro.conf.FlagCreatePairsOff,)


class Command(Protocol):
    """A dataclass of options; its docstring is the help text.

    A module defines one command as `Command`, or a group of commands as the dict `COMMANDS`; the help text of a group
    is the docstring of the module. A command with `without_torch = True` runs without importing torch.
    """

    def prepare(self) -> Callable[[], int]:
        """Checks the options; returns a function that does the work and returns the exit code.

        Raises ValueError with one sentence for an invalid option.
        """


def start() -> int:
    """The entry point of the process; in distributed training, exits without the finalization of Python."""
    code = main()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        end_process(code)
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    prepare_streams()
    try:
        try:
            return _run_words(words)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        discard(sys.stdout)
        return OUTPUT_CLOSED
    except OSError as error:
        discard(sys.stdout)
        print(f"dcnet: the output cannot be written: {sentence_of(error)}", file=sys.stderr)
        return FAILED
    except SystemExit as ended:
        # rich exits with 1 if the output is closed.
        if isinstance(ended.__context__, BrokenPipeError):
            return OUTPUT_CLOSED
        raise


def _run_words(words: Sequence[str]) -> int:
    try:
        if words[:1] in (["--version"], ["-V"]):
            print(
                f"dcnet {dcnet.__version__} (torch {version('torch')}, Python {platform.python_version()})", flush=True
            )
            return 0
        return _run(parse(words))
    except UnknownCommandError as error:
        return _report(error)
    except KeyboardInterrupt:
        print(MESSAGE, file=sys.stderr)
        return INTERRUPTED


class UnknownCommandError(ValueError):
    """Raised if the first words of the command line are not a command."""


def parse(words: Sequence[str]) -> Command:
    """Parses a command and its options; without a command, shows the help of all commands."""
    if not words or words[0].startswith("-"):
        return _parse_application(application(), words or ["--help"], "dcnet", cli.__doc__)
    name = _choose(command_names(), words[0], "command")
    module, rest = _module(name), list(words[1:])
    if not hasattr(module, "COMMANDS"):
        return _parse_command(module.Command, rest, f"dcnet {name}")
    if not rest or rest[0].startswith("-"):
        return _parse_application(_group(module), rest, f"dcnet {name}", module.__doc__)
    part = _choose(module.COMMANDS, rest[0], f"{name} command")
    return _parse_command(module.COMMANDS[part], rest[1:], f"dcnet {name} {part}")


def command_names() -> list[str]:
    """Returns the names of commands and groups of commands: all modules of this package but two."""
    found = [module.name for module in pkgutil.iter_modules(cli.__path__) if module.name not in NO_COMMANDS]
    return [name.replace("_", "-") for name in found]


def _choose(names: Sequence[str], word: str, kind: str) -> str:
    if word not in names:
        raise UnknownCommandError(str(unknown_name(kind, word, names)))
    return word


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{cli.__name__}.{name.replace('-', '_')}")


def _parse_command(command: type[Command], words: Sequence[str], prog: str) -> Command:
    return tyro.cli(command, prog=prog, args=words, config=CONFIG)


def _parse_application(app: SubcommandApp, words: Sequence[str], prog: str, about: str | None) -> Command:
    command: Command = app.cli(prog=prog, description=about, args=words, config=CONFIG)
    return command


def application() -> SubcommandApp:
    """Returns an application with all commands, for the help and for shell completion."""
    found = SubcommandApp()
    for name in command_names():
        module = _module(name)
        if hasattr(module, "COMMANDS"):
            found.command(_group(module), name=name, help=report.listing.first_line(module))
        else:
            found.command(module.Command, name=name, help=report.listing.first_line(module.Command))
    return found


def _group(module: ModuleType) -> SubcommandApp:
    found = SubcommandApp()
    for name, command in module.COMMANDS.items():
        found.command(command, name=name, help=report.listing.first_line(command))
    return found


def _run(command: Command) -> int:
    if not getattr(command, "without_torch", False):
        # Import torch before Ctrl-C raises an exception, which must not interrupt this import.
        importlib.import_module("torch")
    leave_to_the_command()
    try:
        work = command.prepare()
    except BrokenPipeError:
        raise
    except OSError as error:
        # For example, a name that is too long, or a folder without permission.
        return _report(sentence_of(error))
    except (ValueError, argparse.ArgumentTypeError) as error:
        return _report(error)
    try:
        return work()
    except BrokenPipeError:
        raise
    except OSError as error:
        # For example, a full disk.
        code = _report(sentence_of(error), FAILED)
        _flush_or_discard()
        return code
    except (MemoryError, RuntimeError) as error:
        if not bench.meter.out_of_memory(error):
            raise
        first = str(error).splitlines()[:1]
        return _report(": ".join(["out of memory; use a smaller batch or a smaller network", *first]), FAILED)


def _report(problem: object, code: int = BAD_INPUT) -> int:
    print(f"dcnet: {visible(problem)}", file=sys.stderr)
    return code


def _flush_or_discard() -> None:
    """Flushes stdout after a reported error; discards it if stdout itself fails."""
    try:
        sys.stdout.flush()
    except OSError:
        discard(sys.stdout)
