"""What all benchmarks have in common: a configuration, groups of rows, and a record."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from dcnet.bench.meter import Clock, Meter

Row = dict[str, Any]


class Steps:
    """Hears of every step of the work; this one does not listen."""

    def say(self, text: str) -> None:
        """Takes note of what comes next."""

    def advance(self) -> None:
        """Takes note that a step is done."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """What is asked of every benchmark."""

    device: str
    operators: list[str]
    threads: int
    repeats: int = 20
    warmup: int = 3


class Benchmark(ABC):
    """Measures groups of rows, each with a base that it is compared with."""

    name: ClassVar[str]

    def __init__(self, config: Config, meter: Meter):
        self.config, self.meter = config, meter

    @property
    @abstractmethod
    def step_count(self) -> int:
        """How often `measure` advances."""

    @abstractmethod
    def measure(self, steps: Steps) -> Iterator[list[Row]]:
        """Gives the rows of one group after the other."""

    def prepare(self) -> dict[str, Any]:
        """What is found out before all else, for the record."""
        return {}

    def summary(self, results: list[Row]) -> dict[str, Any]:
        """What follows from the results, for the record."""
        return {}

    def described(self) -> dict[str, Any]:
        """The configuration, for the record."""
        return asdict(self.config)

    def rounds(self, clocks: Iterable[Clock]) -> int:
        """The rounds of one group that is timed by these clocks."""
        return sum(sum(clock.rounds(self.config.warmup, self.config.repeats)) for clock in clocks)
