"""The option that all lists take."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """How a list is shown."""

    json: bool = False
    """Print one JSON document, and nothing else."""
