"""Runs the tests and benchmarks that need a GPU, the most valuable ones first, within a time limit.

`python scripts/gpu_check.py --out checked --minutes 20` writes logs, the records of benchmarks and a summary into the
folder `checked`. Nothing is downloaded: `--wheels` names a folder with what is not installed. If TRITON_CACHE_DIR and
TORCHINDUCTOR_CACHE_DIR name folders that are kept, a later call need not compile the same kernels again.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# In seconds: the least time of a stage, and the time that processes have to write their results before they are killed.
LEAST_TIME, GRACE = 15.0, 10.0
MAX_WORKERS = 15
TIMM = ("resnet50", "vit_small_patch16_224", "convnext_tiny", "efficientnet_b0", "mobilenetv3_large_100")


@dataclass(frozen=True)
class Stage:
    """A command after `python`, and the seconds that it may take.

    In the command, {out} is the output folder and {minutes} the time of a benchmark; {workers} are options of pytest.
    """

    name: str
    seconds: float
    command: tuple[str, ...]


def tests(name: str, seconds: float, *names: str) -> Stage:
    """A stage of test files; a name without a folder is one of the kernels. Verbose, since it may be stopped."""
    files = [name if "/" in name else f"tests/kernels/test_{name}.py" for name in names]
    words = ("-m", "pytest", "-vv", "-m", "not slow", "-p", "no:benchmark", "{workers}", *files)
    return Stage(f"tests-{name}", seconds, words)


def bench(name: str, seconds: float, command: str, record: str) -> Stage:
    words = ("-m", "dcnet", "bench", *command.split(), "--device", "cuda", "--json", f"{{out}}/{record}_cuda.json")
    return Stage(f"bench-{name}", seconds, words)


LAYERS = "layers --minutes {minutes} --operators"
NETWORK = "network --minutes {minutes} --operators tanh-cos --mode graph compile --repeats 8"
BOTH = "tanh-cos sphere-cos --variants eager compiled --repeats 10"
OTHERS = ("tests/training/test_training_on_gpu.py", "tests/bench/test_cuda_meter.py", "tests/data/test_batches.py")
STAGES = (
    tests("heads", 150, "tests/losses/test_fused_head.py"),
    tests("attention", 150, "tests/test_flex_scores.py"),
    tests("rows", 150, "unit_rows", "unit_product", "attention_rows"),
    tests("blocks", 180, "tests/test_fuse.py", "block", "known_blocks", "epilogues", "folded_inference"),
    tests("layers", 300, "kernels_on_gpu", "convolution", "depthwise", "linear", "filter_products", "device_functions"),
    tests("rest", 300, *OTHERS, "autograd", "dispatch", "known_calls", "plan_cache", "kernel_compilation"),
    Stage("eager-time", 60, ("scripts/eager_time.py",)),
    Stage("fused-training", 120, ("scripts/fused_training.py", "--jobs", "8")),
    bench("inference", 150, "inference --compile --networks resnet32 --operators tanh-cos --repeats 10", "inference"),
    bench("one-layer", 90, f"{LAYERS} tanh-cos --variants eager --repeats 8", "one_layer"),
    bench("linear", 150, f"{LAYERS} {BOTH} --shapes linear pointwise attention", "linear"),
    bench("depthwise", 90, f"{LAYERS} {BOTH} --shapes depthwise", "depthwise"),
    bench("network", 180, f"{NETWORK} --model resnet32 --batch 512 128", "network"),
    bench("blocks", 120, "blocks --operators tanh-cos --repeats 8", "blocks"),
    bench("heads", 180, "heads", "heads"),
    *(bench(f"timm-{name}", 120, f"{NETWORK} --batch 64 --model timm:{name}", f"timm_{name}") for name in TIMM),
)
# The line of a test in the output of pytest -v, with and without pytest-xdist.
WORD = r"(PASSED|FAILED|ERROR)"
RESULT = re.compile(rf"^\[gw\d+\].*? {WORD} (\S.*?)\s*$|^(tests/\S.*?) {WORD}\b", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """How a stage ended, its seconds, and lines about it."""

    name: str
    ended: str
    seconds: float = 0.0
    lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n    ".join([f"{self.name:32} {self.seconds:6.0f} s  {self.ended}", *self.lines])


def environment(packages: Path, wheels: Path | None) -> dict[str, str]:
    """Unpacks the wheels; returns the environment of all stages. Packages need no more than that to be imported."""
    for wheel in sorted(wheels.glob("*.whl")) if wheels else ():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(packages)
    paths = [str(ROOT), str(packages), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}


def command_of(stage: Stage, out: Path, seconds: float, env: Mapping[str, str]) -> list[str]:
    """The command of a stage with its placeholders replaced; pytest has workers if pytest-xdist can be imported."""
    # A benchmark stops before the limit, and then writes a complete record.
    minutes = f"{0.8 * seconds / 60:.2f}"
    words = [word.replace("{out}", str(out)).replace("{minutes}", minutes) for word in stage.command]
    if "{workers}" in words:
        found = subprocess.run([sys.executable, "-c", "import xdist"], env=env, stderr=subprocess.DEVNULL, check=False)
        count = min(MAX_WORKERS, os.cpu_count() or 1)
        words[(place := words.index("{workers}")) : place + 1] = [] if found.returncode else ["-n", str(count)]
    return [sys.executable, *words]


def kill(process: subprocess.Popen[bytes]) -> None:
    """Ends a process with all its children: first with a request, and after a while by force."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(GRACE)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def run_stage(stage: Stage, out: Path, seconds: float, env: Mapping[str, str]) -> Outcome:
    """Runs a stage for at most these seconds, with its output in a log; its children end with it."""
    log, started = out / f"{stage.name}.log", time.monotonic()
    print(f"{stage.name}: at most {seconds:.0f} s, see {log}", flush=True)
    with log.open("wb") as output:
        words = command_of(stage, out, seconds, env)
        process = subprocess.Popen(words, stdout=output, stderr=output, cwd=ROOT, env=env, start_new_session=True)
        try:
            ended = f"exit code {process.wait(seconds)}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after its limit of {seconds:.0f} s"
        except KeyboardInterrupt:
            ended = "interrupted"
        finally:
            kill(process)
    return Outcome(stage.name, ended, time.monotonic() - started, lines_about(log.read_text(errors="replace")))


def lines_about(text: str) -> tuple[str, ...]:
    """The numbers of tests and the names of those that failed, if there are any tests; otherwise the last lines."""
    found = [(word or last, name or first) for word, name, first, last in RESULT.findall(text)]
    if not found:
        return tuple(text.strip().splitlines()[-5:])
    bad = [f"{word} {name}" for word, name in dict.fromkeys(found) if word != "PASSED"]
    return (f"{len(found) - len(bad)} passed, {len(bad)} failed", *bad)


def run_all(stages: Sequence[Stage], out: Path, minutes: float, env: Mapping[str, str]) -> list[Outcome]:
    """Runs the stages in turn until the time is over, and writes the summary after each of them."""
    end, outcomes = time.monotonic() + 60 * minutes, list[Outcome]()
    for stage in stages:
        left = end - time.monotonic()
        if left < min(LEAST_TIME, stage.seconds):
            outcomes.append(Outcome(stage.name, "not run: no time was left"))
        else:
            outcomes.append(run_stage(stage, out, min(stage.seconds, left), env))
        (out / "summary.txt").write_text("".join(f"{outcome}\n" for outcome in outcomes))
        if outcomes[-1].ended == "interrupted":
            break
    return outcomes


def parse(words: Sequence[str] | None, stages: Sequence[Stage]) -> argparse.Namespace:
    names = [stage.name for stage in stages]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the folder of logs, records and summary.txt")
    parser.add_argument("--minutes", type=float, default=20, help="the limit of all stages together (default: 20)")
    parser.add_argument("--wheels", type=Path, help="a folder with wheels of packages that are not installed")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help="only these stages, in their order")
    parser.add_argument("--list", action="store_true", help="print the stages and their limits in seconds")
    given = parser.parse_args(words)
    if not given.list and given.out is None:
        parser.error("--out is missing: name a folder for the results")
    if given.wheels and not given.wheels.is_dir():
        parser.error(f"--wheels: there is no folder {str(given.wheels)!r}")
    return given


def main(words: Sequence[str] | None = None, stages: Sequence[Stage] = STAGES) -> int:
    """Returns 0 if all stages did, 1 otherwise, and 130 after Ctrl-C."""
    given = parse(words, stages)
    chosen = [stage for stage in stages if given.only is None or stage.name in given.only]
    if given.list:
        print("".join(f"{stage.name:32} {stage.seconds:4.0f} s\n" for stage in chosen), end="")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as packages:
        outcomes = run_all(chosen, out, given.minutes, environment(Path(packages), given.wheels))
    print((out / "summary.txt").read_text(), end="")
    passed = all(outcome.ended == "exit code 0" for outcome in outcomes)
    return 130 if outcomes[-1].ended == "interrupted" else 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
