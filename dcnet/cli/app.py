"""From the words on the command line to an exit code."""

import argparse
import importlib
import os
import pkgutil
import platform
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Protocol

import torch
import tyro
from tyro.extras import SubcommandApp

import dcnet
from dcnet.cli import commands
from dcnet.ending import end_process
from dcnet.escapes import visible
from dcnet.files import sentence_of
from dcnet.interruption import INTERRUPTED, MESSAGE, leave_to_the_command
from dcnet.output import CUT_OFF, FAILED, discard, prepare_streams
from dcnet.spec import unknown

USAGE = 2


class Command(Protocol):
    """What a file in `commands` gives by the name of `Command`: a dataclass of options, whose docstring is the help."""

    def prepare(self) -> Callable[[], int]:
        """Checks the options, raising ValueError with one sentence, and gives the work, which gives the exit code."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command of the arguments, and gives the exit code: 2 for options that are wrong."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    prepare_streams()
    try:
        try:
            return _carried_out(given)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read along has seen enough.
        discard(sys.stdout)
        return CUT_OFF
    except OSError as error:
        discard(sys.stdout)
        print(f"dcnet: the output cannot be written: {sentence_of(error)}", file=sys.stderr)
        return FAILED
    except SystemExit as ended:
        # It is rich that ends the program so, with 1, when its reader has gone.
        if isinstance(ended.__context__, BrokenPipeError):
            return CUT_OFF
        raise


def _carried_out(given: Sequence[str]) -> int:
    try:
        leave_to_the_command()
        if given[:1] in (["--version"], ["-V"]):
            print(_version(), flush=True)
            return 0
        _check_names(commands, given)
        return _run(_command(given))
    except UnknownCommandError as error:
        print(f"dcnet: {visible(error)}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print(MESSAGE, file=sys.stderr)
        return INTERRUPTED


def _version() -> str:
    return f"dcnet {dcnet.__version__} (torch {torch.__version__}, Python {platform.python_version()})"


class UnknownCommandError(ValueError):
    """The first words on the command line name no command."""


def _check_names(package: ModuleType, words: Sequence[str], group: str = "") -> None:
    """Raises UnknownCommandError where the first word is not a command of the package, with the nearest name."""
    if not words or words[0].startswith("-"):
        return
    found = {_name_of(module): module for module in pkgutil.iter_modules(package.__path__)}
    name = words[0].replace("_", "-")
    if name not in found:
        raise UnknownCommandError(str(unknown(f"{group}command", words[0], found)))
    if found[name].ispkg:
        module = importlib.import_module(f"{package.__name__}.{found[name].name}")
        _check_names(module, words[1:], f"{name} ")


def _name_of(module: pkgutil.ModuleInfo) -> str:
    return module.name.replace("_", "-")


def start() -> int:
    """`dcnet` as a process of its own, which ends at once where it is one of several."""
    code = main()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        end_process(code)
    return code


def _command(given: Sequence[str]) -> Command:
    """What is to be done; without any words there is nothing to do but to say which commands there are."""
    command: Command = make_application(commands, given).cli(
        prog="dcnet", description=commands.__doc__, args=given or ["--help"], config=(tyro.conf.FlagCreatePairsOff,)
    )
    return command


def _run(command: Command) -> int:
    try:
        work = command.prepare()
    except BrokenPipeError:
        raise
    except OSError as error:
        # Of a name that is too long, or a folder that nobody may look into.
        print(f"dcnet: {visible(sentence_of(error))}", file=sys.stderr)
        return USAGE
    except (ValueError, argparse.ArgumentTypeError) as error:
        print(f"dcnet: {visible(error)}", file=sys.stderr)
        return USAGE
    try:
        code = work()
    except BrokenPipeError:
        raise
    except OSError as error:
        # Such as a disk that is full.
        print(f"dcnet: {visible(sentence_of(error))}", file=sys.stderr)
        _flush_or_discard()
        return FAILED
    except (MemoryError, RuntimeError) as error:
        from dcnet.bench.room import out_of_memory

        if not out_of_memory(error):
            raise
        print(f"dcnet: {visible(_lack_of_memory(error))}", file=sys.stderr)
        return FAILED
    return code


def _flush_or_discard() -> None:
    """After an error that was reported, which may have been one of the output itself."""
    try:
        sys.stdout.flush()
    except OSError:
        discard(sys.stdout)


def _lack_of_memory(error: Exception) -> str:
    """The first line of what torch says at length."""
    told = str(error).splitlines()[:1]
    return ": ".join(["out of memory, and fewer images at once or a smaller network need less", *told])


def make_application(package: ModuleType, words: Sequence[str] = ()) -> SubcommandApp:
    """The commands in the files of a package, with the packages in it as groups of commands.

    A command that the words do not name has the first line of its help alone, for the list of commands.
    """
    application = SubcommandApp()
    for found in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{found.name}")
        name = _name_of(found)
        if found.ispkg:
            application.command(make_application(module, words[1:]), name=name, help=module.__doc__)
        else:
            chosen = name in words[:1]
            application.command(module.Command, name=name, help=None if chosen else _first_line(module.Command))
    return application


def _first_line(command: type) -> str:
    return (command.__doc__ or "").strip().splitlines()[0]
