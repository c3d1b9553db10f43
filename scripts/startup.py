"""Measures the start-up times of `dcnet` and compares them with targets; the exit code is 1 if one is missed.

Run `python scripts/startup.py` on an idle machine. Every time is the best of several.
"""

import subprocess
import sys
import time

REPEATS = 5
# Commands and their targets, in seconds on an idle core.
COMMANDS = {
    "dcnet --help": (["-m", "dcnet", "--help"], 0.6),
    "dcnet list operators": (["-m", "dcnet", "list", "operators"], 0.6),
    "dcnet train --bogus": (["-m", "dcnet", "train", "--bogus"], 0.6),
}
IMPORT = "import time, torch, triton; start = time.perf_counter(); from dcnet import DecoupledConv2d, decouple; "
IMPORT += "print(time.perf_counter() - start)"
IMPORT_TARGET = 0.3


def seconds(arguments: list[str]) -> float:
    """The shortest run time of a Python process."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], capture_output=True, check=False)
        times.append(time.perf_counter() - start)
    return min(times)


def import_seconds() -> float:
    """The shortest time to import the layers after torch and triton."""
    call = [sys.executable, "-c", IMPORT]
    return min(float(subprocess.run(call, capture_output=True, check=True).stdout) for _ in range(REPEATS))


def main() -> int:
    found = {name: (seconds(arguments), target) for name, (arguments, target) in COMMANDS.items()}
    found["import dcnet, after torch"] = (import_seconds(), IMPORT_TARGET)
    for name, (measured, target) in found.items():
        verdict = "ok" if measured <= target else "TOO SLOW"
        print(f"{name:28} {measured:6.2f} s, target {target:.1f} s: {verdict}")
    return 0 if all(measured <= target for measured, target in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
