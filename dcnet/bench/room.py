"""How much memory there is, how much a call takes at its peak, and whether it ran out of it."""

import ctypes
import gc
import math
from pathlib import Path

import torch

from dcnet.bench.meter import Call

GIB = 2**30
STATUS, INFO, REFERENCES = (Path("/proc", name) for name in ("self/status", "meminfo", "self/clear_refs"))
# Of what is free. A GPU refuses what it does not have, but a system may end the process, and others use it, too.
USABLE = {"cpu": 0.9, "cuda": 1.0}


def free_bytes(device: str) -> float:
    """What is left to take on the device; infinite where nobody tells."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    return _entry(INFO, "MemAvailable") or math.inf


def usable_bytes(device: str) -> float:
    """What a head may take of it."""
    return USABLE[device] * free_bytes(device)


class Peak:
    """The most bytes that calls take, beyond what was taken when it was made; None where nobody tells."""

    def __init__(self, device: str):
        self.device = device
        tidy(device)
        self.before = torch.cuda.memory_allocated() if device == "cuda" else _entry(STATUS, "VmRSS")

    def of(self, call: Call) -> int | None:
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            call()
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() - (self.before or 0)
        return self._of_process(call)

    def _of_process(self, call: Call) -> int | None:
        tidy(self.device)
        try:
            # 5 sets the high-water mark back to what is taken now.
            REFERENCES.write_text("5", encoding="utf-8")
        except OSError:
            return None
        call()
        highest = _entry(STATUS, "VmHWM")
        return None if highest is None or self.before is None else highest - self.before


def tidy(device: str) -> None:
    """Gives back what is no longer used, to the device or to the system."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        return
    try:
        # What is freed in small blocks would stay with the process, and be missing from the next peak.
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):
        return


def out_of_memory(error: Exception) -> bool:
    """Whether it is for lack of memory that a call failed; on a CPU torch says so in words alone."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def _entry(file: Path, name: str) -> int | None:
    """The bytes of one line of the system's own accounts, which count in kB."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(found[0]) * 1024 if found else None
