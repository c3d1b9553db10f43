"""Where a number was measured."""

import importlib.metadata
import os
import platform
from datetime import UTC, datetime
from pathlib import Path

import torch

import dcnet


def environment() -> dict[str, str | int | None]:
    """The versions, the processor, the GPU if there is one, and the time, for a record."""
    return {
        "dcnet": dcnet.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        **gpu(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def gpu() -> dict[str, str | int | None]:
    """The first GPU and the versions of what runs on it; nothing where there is none."""
    if not torch.cuda.is_available():
        return {}
    return {
        "gpu": torch.cuda.get_device_name(0),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "triton": _version("triton"),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The processor's name where the system tells it, otherwise its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
