"""Builds the sdist and the wheel, installs the wheel into an empty environment, and uses it.

`make package` runs this script. The wheel is installed without constraints.txt, so with the newest versions of its
dependencies. `dcnet train` and `dcnet report` run in a folder outside the repository.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT = 900
TRAIN = ["train", "--operators", "conv", "tanh-cos", "--epochs", "2", "--train-images", "300", "--device", "cpu"]


def run(*command: str | Path, cwd: Path) -> str:
    """The output of a command; if it fails, prints the output and exits."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    start = time.monotonic()
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    shown = " ".join(Path(word).name for word in map(str, command))
    if done.returncode:
        sys.exit(f"{done.stdout}\n{shown}: exit code {done.returncode}")
    print(f"{shown}: {time.monotonic() - start:.0f} s", flush=True)
    return done.stdout


def build(scratch: Path) -> Path:
    """Builds the sdist, and the wheel from the sdist; returns the wheel."""
    run(sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", scratch / "dist", cwd=ROOT)
    with tarfile.open(next((scratch / "dist").glob("*.tar.gz"))) as archive:
        archive.extractall(scratch / "source", filter="data")
    source = next((scratch / "source").iterdir())
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", scratch / "dist", cwd=source)
    return next((scratch / "dist").glob("*.whl"))


def install(wheel: Path, scratch: Path) -> Path:
    """Installs the wheel and its dependencies into a new environment, and returns its folder of programs."""
    venv.create(scratch / "environment", with_pip=True)
    programs = scratch / "environment" / "bin"
    # No cache, which would keep gigabytes; no compilation, because only a few modules run.
    options = ["--quiet", "--disable-pip-version-check", "--no-cache-dir", "--no-compile"]
    run(programs / "python", "-m", "pip", "install", *options, wheel, cwd=scratch)
    return programs


def use(programs: Path, folder: Path) -> None:
    """Trains two networks and writes a report, which must name both operators."""
    folder.mkdir()
    where = "import dcnet, torch; print(dcnet.__file__, torch.__version__)"
    print(run(programs / "python", "-c", where, cwd=folder).strip())
    run(programs / "dcnet", *TRAIN, cwd=folder)
    run(programs / "dcnet", "report", "--out", "report.html", cwd=folder)
    page = (folder / "report.html").read_text(encoding="utf-8")
    if not all(operator in page for operator in ("conv", "tanh-cos")):
        sys.exit("report.html does not name the operators that were trained")


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        wheel = build(Path(scratch))
        use(install(wheel, Path(scratch)), Path(scratch) / "outside")


if __name__ == "__main__":
    main()
