"""Checks that pip resolves dcnet from the public index alone, for every supported Python.

`make resolve` runs this script. It installs nothing and fetches only metadata. A local wheel or an extra index must
not hide a conflict: `--isolated` makes pip ignore PIP_* variables and the user's settings, and an empty
PIP_CONFIG_FILE the machine's. Only the certificate and the proxy are kept, which pip may need to reach an index.

pip treats `--python-version 3.11` as 3.11.0, so a pin that needs a later patch release fails too. Environment markers
are those of the running Python.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXTRAS = ("", "[dev]")
CONNECTION = ("cert", "client-cert", "proxy")
TIMEOUT = 600
UNREACHABLE = re.compile(
    r"connection broken by|Could not fetch URL|Connection (?:refused|reset|timed out)|\b50\d Server"
)


class ResolveError(Exception):
    """A resolution failed."""


@dataclass(frozen=True)
class Case:
    """One resolution: the Python version, the extra, and whether constraints.txt is used."""

    python: str
    extra: str
    constrained: bool

    def __str__(self) -> str:
        return f"Python {self.python}, .{self.extra}" + ("" if self.constrained else " without constraints.txt")


@dataclass(frozen=True)
class Resolver:
    """Runs pip for the project in a folder, with one index."""

    project: Path
    scratch: Path
    options: tuple[str, ...] = ()

    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        return {**kept, "PIP_CONFIG_FILE": os.devnull}

    def run(self, pip: list[str], *arguments: str) -> None:
        """Runs pip in isolation; raises ResolveError if it fails."""
        command = [sys.executable, *pip, "--isolated", "--disable-pip-version-check", *arguments, *self.options]
        keywords = {"cwd": self.project, "env": self.environment(), "timeout": TIMEOUT}
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, **keywords)
        except subprocess.TimeoutExpired:
            raise ResolveError(f"the package index did not answer within {TIMEOUT} s, so nothing was checked") from None
        if done.returncode == 0:
            return
        if UNREACHABLE.search(done.stderr) and "ResolutionImpossible" not in done.stderr:
            raise ResolveError(f"the package index cannot be reached, so nothing was checked: {_last(done.stderr)}")
        raise ResolveError(f"pip cannot resolve it. {_cause(done)}")

    def newest_pip(self) -> Path:
        """Downloads the newest pip and returns its folder, which Python can run; older ones fetch gigabytes."""
        self.run(["-m", "pip"], "download", "--quiet", "--no-deps", f"--dest={self.scratch}", "pip")
        with zipfile.ZipFile(next(self.scratch.glob("pip-*.whl"))) as wheel:
            wheel.extractall(self.scratch)
        return self.scratch / "pip"

    def resolve(self, case: Case, pip: Path) -> dict[str, str]:
        """The versions of the packages that pip would install."""
        report = self.scratch / f"{case}.json"
        arguments = ["install", "--dry-run", "--use-feature=fast-deps", "--only-binary=:all:", "--no-cache-dir"]
        target = [f"--python-version={case.python}", f"--target={self.scratch / 'target'}", f"--report={report}"]
        constraints = ["--constraint=constraints.txt"] if case.constrained else []
        self.run([str(pip)], *arguments, *target, *constraints, f".{case.extra}")
        packages = [item["metadata"] for item in json.loads(report.read_text(encoding="utf-8"))["install"]]
        return {package["name"].lower(): package["version"] for package in packages}


def connection_settings() -> list[str]:
    """The certificate and the proxy in the pip configuration of this machine, as options."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    found = dict(re.findall(r"^(?:global|download|install|:env:)\.([\w-]+)='(.*)'$", listed, re.MULTILINE))
    return [f"--{name}={found[name]}" for name in CONNECTION if name in found]


def _cause(done: subprocess.CompletedProcess[str]) -> str:
    """The conflict that pip reports, or else the last lines of its output."""
    conflict = re.search(
        r"^The conflict is caused by:\n.*?(?=\n\n|\Z)", done.stdout + done.stderr, re.MULTILINE | re.DOTALL
    )
    return conflict[0] if conflict else "\n".join(done.stderr.strip().splitlines()[-5:])


def _last(text: str) -> str:
    return text.strip().splitlines()[-1]


def supported_pythons(project: Path) -> list[str]:
    """The Python versions in the classifiers."""
    classifiers = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]["classifiers"]
    found = re.findall(r"^Programming Language :: Python :: (3\.\d+)$", "\n".join(classifiers), re.MULTILINE)
    if not found:
        raise ResolveError("pyproject.toml has no classifier 'Programming Language :: Python :: 3.x'")
    return found


def cases(pythons: list[str]) -> Iterator[Case]:
    """Each Python with and without the extra, and the newest Python without constraints."""
    for python in pythons:
        yield from (Case(python, extra, constrained=True) for extra in EXTRAS)
    yield Case(pythons[-1], "", constrained=False)


def check(resolver: Resolver) -> int:
    """Resolves all cases in parallel, since they wait for the network; prints results and returns the exit code."""
    pip = resolver.newest_pip()
    wanted = list(cases(supported_pythons(resolver.project)))
    with ThreadPoolExecutor(len(wanted)) as pool:
        results = [(case, pool.submit(resolver.resolve, case, pip)) for case in wanted]
    failed, torch = 0, set()
    for case, result in results:
        error = result.exception()
        if error is None:
            torch.add(result.result()["torch"])
            print(f"{case}: torch {result.result()['torch']}")
        else:
            failed += 1
            print(f"{case}: {error}", file=sys.stderr)
    if torch:
        print(f"newest torch tried: {max(torch, key=_numbers)}")
    return 1 if failed else 0


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--project", type=Path, default=ROOT, help="folder of pyproject.toml and constraints.txt")
    parser.add_argument("--index-url", help="the only index to ask (default: pip's own)")
    options = parser.parse_args()
    index = [f"--index-url={options.index_url}"] if options.index_url else []
    with tempfile.TemporaryDirectory() as scratch:
        try:
            return check(Resolver(options.project, Path(scratch), ("--retries=2", *index, *connection_settings())))
        except ResolveError as error:
            print(error, file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())
