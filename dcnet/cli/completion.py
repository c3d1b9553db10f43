"""`dcnet completion`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import tyro

from dcnet.cli import app


@dataclass(frozen=True, kw_only=True)
class Command:
    """Print a script for shell completion of commands and options.

    For bash, once:

    mkdir -p ~/.local/share/bash-completion/completions

    dcnet completion bash > ~/.local/share/bash-completion/completions/dcnet

    For zsh, once, with fpath+=~/.zfunc and autoload -Uz compinit; compinit in ~/.zshrc:

    mkdir -p ~/.zfunc

    dcnet completion zsh > ~/.zfunc/_dcnet
    """

    without_torch: ClassVar[bool] = True

    shell: Annotated[Literal["bash", "zsh"], tyro.conf.Positional]
    """The shell."""

    def prepare(self) -> Callable[[], int]:
        return self._print

    def _print(self) -> int:
        try:
            app.parse(["--tyro-print-completion", self.shell])
        except SystemExit as ended:
            # tyro exits after it prints the script.
            return int(ended.code or 0)
        raise AssertionError(f"tyro printed no completion for {self.shell}")
