"""Where a number was measured."""

import os
import platform
from datetime import UTC, datetime
from pathlib import Path

import torch

import dcnet


def environment() -> dict[str, str | int | None]:
    """The versions, the processor and the time, for a record."""
    return {
        "dcnet": dcnet.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def cpu_name() -> str:
    """The processor's name where the system tells it, otherwise its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
