"""Those who are told how a run goes."""

from typing import Any

Point = dict[str, float]


class Watcher:
    """Is told how a run goes, and says nothing; see `dcnet.training.progress` for one that shows it."""

    def starts(self, name: str, done: int, total: int) -> None:
        """A run starts, or goes on, after so many of its steps."""

    def steps(self, done: int, loss: float, accuracy: float, images_per_second: float) -> None:
        """So many steps are done; loss and accuracy are of the training images since the last evaluation."""

    def evaluated(self, point: Point) -> None:
        """The test set was seen."""

    def ends(self, record: dict[str, Any]) -> None:
        """The run is over, one way or another."""

    def note(self, text: str) -> None:
        """Something that is worth a line."""
