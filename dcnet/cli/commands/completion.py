"""`dcnet completion`."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True, kw_only=True)
class Command:
    """Print a script with which a shell completes commands and options of dcnet at a press of Tab.

    For bash, once:

    mkdir -p ~/.local/share/bash-completion/completions

    dcnet completion bash > ~/.local/share/bash-completion/completions/dcnet

    For zsh, once, with fpath+=~/.zfunc and autoload -Uz compinit; compinit in ~/.zshrc:

    mkdir -p ~/.zfunc

    dcnet completion zsh > ~/.zfunc/_dcnet
    """

    shell: Annotated[Literal["bash", "zsh"], tyro.conf.Positional]
    """The shell that the script is for."""

    def prepare(self) -> Callable[[], int]:
        return self._print

    def _print(self) -> int:
        from dcnet.cli import app

        try:
            app.main(["--tyro-print-completion", self.shell])
        except SystemExit as ended:
            # tyro ends the program after the script.
            return int(ended.code or 0)
        print(f"dcnet completion: there is no script for {self.shell}", file=sys.stderr)
        return 1
