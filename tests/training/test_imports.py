"""`dcnet train` imports only the modules that it needs."""

import json
import os
import subprocess
import sys
from pathlib import Path

CODE = """
import sys
from dcnet.cli.app import main

options = "--steps 1 --operators conv tanh-cos --train-images 60 --width 0.1 --device cpu --adversary fgsm --json"
assert main(["train", *options.split(), "--runs", sys.argv[1]]) == 0
print("modules:", *(name for name in sys.modules if name.startswith(("dcnet", "matplotlib", "timm"))))
"""


def test_training_imports_no_attacks_verification_reports_and_other_commands(tmp_path: Path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", CODE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    out, _, names = done.stdout.rpartition("modules: ")
    assert [record["status"] for record in json.loads(out)] == ["done", "done"]
    assert "step 1" in done.stderr
    modules = set(names.split())
    assert "dcnet.training.trainer" in modules
    # The packages are lazy: they may be imported without their modules.
    packages = ("robustness", "verification", "report", "bench", "experiments", "inference")
    extra = {name for name in modules if name.startswith(tuple(f"dcnet.{package}." for package in packages))}
    commands = {name for name in modules if name.startswith("dcnet.cli.")}
    assert not extra
    assert commands <= {"dcnet.cli.app", "dcnet.cli.options", "dcnet.cli.train"}
    assert not modules & {"matplotlib", "timm"}
