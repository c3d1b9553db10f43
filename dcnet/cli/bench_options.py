"""Options that all benchmarks take, and what is wrong with them in one sentence."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

BY_DEVICE = "(default: by device)"


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What every benchmark takes."""

    repeats: Annotated[int, tyro.conf.arg(metavar="N")] = 20
    """Rounds that count. In a round everything is timed once, in turns."""

    warmup: Annotated[int, tyro.conf.arg(metavar="N")] = 3
    """Rounds before those."""

    threads: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint=BY_DEVICE)] = None
    """Threads of torch: 2 on the cpu, as many as torch takes by itself on cuda."""

    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(optional)")] = None
    """Write all that was measured to this file."""

    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(optional)")] = None
    """Draw what was measured into this file, .png or .svg."""

    def check(self) -> None:
        """Refuses numbers that are too small and files that cannot be written, before any work is done."""
        from dcnet.report.options import writable

        at_least(2, "--repeats", self.repeats)
        at_least(0, "--warmup", self.warmup)
        if self.threads is not None:
            at_least(1, "--threads", self.threads)
        if self.plot is not None:
            check_plot(self.plot)
        for path in (self.json, self.plot):
            if path is not None:
                writable(str(path))

    def chosen_threads(self, device: str) -> int:
        import torch

        return self.threads or (2 if device == "cpu" else torch.get_num_threads())


# Without a name of their own, these options stand beside those of the command.
Shared = Annotated[BenchOptions, tyro.conf.arg(name="")]
Device = Literal["auto", "cpu", "cuda"]


def chosen_device(asked: Device) -> Literal["cpu", "cuda"]:
    """The device that is asked for, if it is there."""
    import torch

    if asked == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is 'cuda', but torch finds no GPU here: use --device cpu")
    return "cuda" if asked != "cpu" and torch.cuda.is_available() else "cpu"


def at_least(limit: float, option: str, *values: float) -> None:
    """Refuses values below the limit."""
    for value in values:
        if not value >= limit:
            raise ValueError(f"{option} must be {limit} or more, not {value}")


def above_zero(option: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ValueError(f"{option} must be a number above 0, not {value}")


def decoupled_operators(specs: Sequence[str]) -> list[str]:
    """The specs as operators write themselves; plain convolution is always there, so naming it adds nothing."""
    from dcnet.operator import PLAIN
    from dcnet.report.options import one_operator

    checked = dict.fromkeys(one_operator(spec) for spec in specs)
    checked.pop(PLAIN, None)
    if not checked:
        raise ValueError(f"--operators must name an operator beside {PLAIN!r}, such as tanh-cos, not {list(specs)!r}")
    return list(checked)


def known_networks(names: Sequence[str]) -> list[str]:
    """The names, each once, if there are networks of these names."""
    from dcnet.models import networks
    from dcnet.models.registry import prefixes

    for name in names:
        if name not in networks and name.partition(":")[0] not in prefixes:
            raise ValueError(f"unknown network {name!r}, expected some of {', '.join(networks)}, timm:<name>")
    return list(dict.fromkeys(names))


def check_plot(path: Path) -> None:
    if path.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"--plot is written as .png or .svg, not as {path.suffix!r} of {str(path)!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib")
