"""The environment of a run: versions, hardware, commit, and the number of workers."""

import importlib.metadata
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import torch

import dcnet

# With more workers that read images, memory and disk are the bottleneck.
MOST_WORKERS = 8


def available_cores() -> int:
    """Cores that this process may use, possibly fewer than the machine has."""
    if count := getattr(os, "process_cpu_count", None):  # From Python 3.13 on.
        return count() or 1
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_workers() -> int:
    """Default number of worker processes that read images: one per core, divided among training processes."""
    return max(1, min(MOST_WORKERS, available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def choose_device(asked: str) -> Literal["cpu", "cuda"]:
    """The device for "auto", "cpu" or "cuda"; ValueError if there is no GPU for "cuda"."""
    if asked == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is 'cuda', but torch finds no GPU here: use --device cpu")
    return "cuda" if asked != "cpu" and torch.cuda.is_available() else "cpu"


def environment() -> dict[str, str | int | None]:
    """Versions, processor, GPU and time, for a record."""
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
    """The first GPU and the versions of CUDA, cuDNN and Triton; empty without a GPU."""
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
    """The name of the processor if the system provides it, otherwise its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit of the running source, with a + if files differ from it; None outside of a checkout.

    The variable DCNET_COMMIT names the commit of a copy without its repository, or with an older one.
    """
    if given := os.environ.get("DCNET_COMMIT"):
        return given
    folder = Path(__file__).parent
    try:
        # An installed copy may be inside another repository.
        _git(folder, "ls-files", "--error-unmatch", "__init__.py")
        found = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no", ".")
    except (OSError, subprocess.CalledProcessError):
        return None
    return found + ("+" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], check=True, capture_output=True, encoding="utf-8", errors="replace"
    )
    return done.stdout.strip()
