"""The command line: parses arguments, runs the command, and returns an exit code.

Every module of this package except this one and `options` is a command, or a group of commands. Only the chosen one is
imported, and torch only after its options are parsed.
"""

import argparse
import contextlib
import dataclasses
import difflib
import importlib
import itertools
import os
import pkgutil
import platform
import re
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from types import ModuleType
from typing import Any, Protocol

import tyro
from tyro.extras import SubcommandApp

import dcnet
from dcnet import bench, cli, report
from dcnet.exit_codes import BAD_INPUT, FAILED, INTERRUPTED, OUTPUT_CLOSED
from dcnet.files import sentence_of
from dcnet.interrupts import MESSAGE, end_process, leave_to_the_command
from dcnet.registry import quote, unknown_name
from dcnet.terminal import discard, prepare_streams, visible

HELP = ("-h", "--help")
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
    except WrongWordsError as error:
        return _report(error)
    except KeyboardInterrupt:
        print(MESSAGE, file=sys.stderr)
        return INTERRUPTED


class WrongWordsError(ValueError):
    """Raised for an unknown command or option, and for a value that an option cannot have."""


def parse(words: Sequence[str]) -> Command:
    """Parses a command and its options; without a command, shows the help of all commands."""
    if not words or words[0] in HELP or words[0].startswith("--tyro-"):
        return _parse_application(application(), words or ["--help"], "dcnet", cli.__doc__)
    if words[0].startswith("-"):
        raise WrongWordsError(f"unknown option {quote(words[0])}; see `dcnet --help`")
    name = _choose(command_names(), words[0], "command")
    module, rest = _module(name), list(words[1:])
    if not hasattr(module, "COMMANDS"):
        return _parse_command(module.Command, rest, f"dcnet {name}")
    if not rest:
        raise WrongWordsError(f"give one of {', '.join(module.COMMANDS)}; see `dcnet {name} --help`")
    if rest[0] in HELP:
        return _parse_application(_group(module), rest, f"dcnet {name}", module.__doc__)
    if rest[0].startswith("-"):
        raise WrongWordsError(f"unknown option {quote(rest[0])}; see `dcnet {name} --help`")
    part = _choose(module.COMMANDS, rest[0], f"{name} command")
    return _parse_command(module.COMMANDS[part], rest[1:], f"dcnet {name} {part}")


def command_names() -> list[str]:
    """Returns the names of commands and groups of commands: all modules of this package but two."""
    found = [module.name for module in pkgutil.iter_modules(cli.__path__) if module.name not in NO_COMMANDS]
    return [name.replace("_", "-") for name in found]


def _choose(names: Sequence[str], word: str, kind: str) -> str:
    if word not in names:
        raise WrongWordsError(str(unknown_name(kind, word, names)))
    return word


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{cli.__name__}.{name.replace('-', '_')}")


def _parse_command(command: type[Command], words: Sequence[str], prog: str) -> Command:
    with _one_sentence(command, words):
        return tyro.cli(command, prog=prog, args=words, config=CONFIG)


def _one_sentence(command: type[Command], words: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    """Raises WrongWordsError in place of tyro's boxes; the hook of tyro is private, and later versions may lack it."""

    def hook(event: Any) -> None:
        with contextlib.suppress(AttributeError):
            if sentence := _sentence(event, command, words):
                raise WrongWordsError(f"{sentence}; see `{event.prog} --help`")

    events: Any = getattr(tyro, "_errors", None)
    return events.on_parse_error(hook) if events else contextlib.nullcontext()


def _sentence(event: Any, command: type[Command], words: Sequence[str]) -> str | None:
    """Says what is wrong, by the kind of the event; None for other kinds, which tyro explains itself."""
    kind = type(event).__name__
    if kind == "MissingArgs":
        return f"give {' and '.join(missing.arg.lowered.metavar for missing in event.missing_arguments)}"
    if kind == "UnrecognizedArgs":
        unknown = next((token for token in event.tokens if token.startswith("-")), event.tokens[0])
        if not unknown.startswith("--"):
            return f"unexpected {quote(unknown)}"
        near = difflib.get_close_matches(unknown, _option_names(command), n=1)
        return f"unknown option {quote(unknown)}" + (f": did you mean {near[0]}?" if near else "")
    if kind == "InvalidChoice":
        choices = sorted(choice for choice in event.choices if choice != "None")
        return f"{event.argument.display_name()} must be one of {', '.join(choices)}, not {quote(event.value)}"
    if kind == "BadValue" and event.reason == "too_few_values":
        return f"{event.argument.display_name()} needs a value"
    if kind == "InstantiationFailure" and event.argument is not None:
        name, types = event.argument.display_name(), repr(event.argument.field.type)
        wanted = "a number" if "float" in types else "a whole number" if re.search(r"\bint\b", types) else "valid"
        return f"{name} must be {wanted}, not {quote(' '.join(_values(name, words)))}"
    return None


def _option_names(options: Any) -> list[str]:
    names = []
    for declared in dataclasses.fields(options):
        if dataclasses.is_dataclass(declared.default_factory):
            names += _option_names(declared.default_factory)
        else:
            names.append(f"--{declared.name.replace('_', '-')}")
    return names


def _values(option: str, words: Sequence[str]) -> list[str]:
    """Returns the words after the option, up to the next option."""
    name, _, value = next((word for word in words if word.partition("=")[0] == option), "").partition("=")
    if value or not name:
        return [value]
    rest = words[words.index(name) + 1 :]
    return list(itertools.takewhile(lambda word: not word.startswith("--"), rest))


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
