"""What the cells of a table come to: for people and for machines."""

from abc import ABC, abstractmethod
from typing import Any


class Finding(ABC):
    """Something that can be told of a table; as a string it is the rest of a sentence."""

    @abstractmethod
    def __str__(self) -> str: ...

    @abstractmethod
    def described(self) -> dict[str, Any]:
        """For machines."""

    @property
    def sentence(self) -> str:
        """It on its own."""
        text = str(self)
        return f"{text[0].upper()}{text[1:]}."
