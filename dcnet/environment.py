"""Where a number was measured."""

import importlib.metadata
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import torch

import dcnet

# Worker processes that read images; with more of them, memory and disks are the limit.
MOST_WORKERS = 8


def available_cores() -> int:
    """Cores that this process may use, which may be fewer than the machine has."""
    if count := getattr(os, "process_cpu_count", None):  # From Python 3.13 on.
        return count() or 1
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_workers() -> int:
    """Worker processes that read images, unless the user says how many: one a core, shared by processes that train."""
    return max(1, min(MOST_WORKERS, available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


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
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit of the source that runs, with a + where files differ from it; None where it is not a checkout."""
    folder = Path(__file__).parent
    try:
        # An installed copy may lie in a folder of somebody else's project.
        _git(folder, "ls-files", "--error-unmatch", "__init__.py")
        found = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no", ".")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("DCNET_COMMIT")
    return found + ("+" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], check=True, capture_output=True, encoding="utf-8", errors="replace"
    )
    return done.stdout.strip()
