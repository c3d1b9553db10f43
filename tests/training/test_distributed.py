"""Training with several processes: the same losses, resuming on other numbers of processes, failures, sharded state."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.moving_runs import STOPPED, the_run
from helpers.processes import PATIENCE, free_port, launch, program_environment
from helpers.small_runs import tiny, train
from safetensors.torch import load_file

from dcnet.data import load_dataset
from dcnet.training import Run, load_model
from dcnet.training.evaluation import Evaluator, batches_of
from dcnet.training.processes import LOST
from dcnet.training.shards import Shards
from dcnet.training.sources import make_source
from dcnet.training.tensor_files import read_tensors

HELPERS = Path(__file__).parents[1] / "helpers"
SMALL = ["--train-images", "60", "--batch-size", "20", "--width", "0.25", "--steps", "12", "--norm", "none"]
TRICKS = ["--projection-every", "4", "--orthonormal", "1e-3", "--weight-decay", "1e-3"]


ALL = {"steps": 12, "width": 0.25, "norm": "none", "projection_every": 4, "orthonormal": 1e-3, "weight_decay": 1e-3}


def the_config():
    return tiny(**ALL)


COMMAND = ["train", *SMALL, *TRICKS, "--device", "cpu"]


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """The run, and the output of its processes."""
    root = tmp_path_factory.mktemp("two")
    done = launch(2, HELPERS / "exiting_command.py", *COMMAND, "--runs", root)
    assert len(list(root.iterdir())) == 1
    return Run.of(the_config(), root), done.stdout


def test_two_processes_have_the_loss_curve_of_one_process(two_processes, tmp_path):
    """Sums are computed in another order: losses after 12 steps in float32 agree to about 1e-7; the test requires 1e-5.

    After so few steps, rounding decides the class of some images: accuracies may differ by two images.
    """
    _, one = train(the_config(), tmp_path)
    two = two_processes[0].record()
    assert (one.execution["processes"], two.execution["processes"]) == (1, 2)
    for part in ("train", "test"):
        losses, accuracies = (
            [record.curves.get(f"{part}_{name}") for record in (one, two)] for name in ("loss", "accuracy")
        )
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        assert accuracies[0] == pytest.approx(accuracies[1], abs=200.001 / one.data.get(f"{part}_images"))


@pytest.mark.slow
def test_two_processes_resume_to_the_same_bits(two_processes, tmp_path):
    """One process gets the signal, and both stop."""
    whole, _ = two_processes
    launch(2, HELPERS / "stopping_command.py", *COMMAND, "--runs", tmp_path, fails=True)
    run = Run.of(the_config(), tmp_path)
    assert (run.record().status, run.record().steps_done) == ("interrupted", 5)
    launch(2, "-m", "dcnet", *COMMAND, "--runs", tmp_path)
    assert run.model_file.read_bytes() == whole.model_file.read_bytes()
    expected, found = whole.record().curves, run.record().curves
    for name in ("train_loss", "train_accuracy", "test_loss", "test_accuracy"):
        # The sums of an interrupted epoch are added up in another order.
        assert found.get(name) == pytest.approx(expected.get(name), rel=1e-12)


def test_each_process_exits_without_finalization(two_processes):
    """In the finalization of Python, threads of torch sometimes abort the process."""
    assert "wrote" in two_processes[1]
    assert "Python shuts down" not in two_processes[1]


def test_sharded_weights_and_moments_are_gathered_and_restored():
    assert launch(2, HELPERS / "sharded_state.py").stdout.count("equal") == 2


def test_batch_size_must_be_a_multiple_of_the_number_of_processes():
    with pytest.raises(ValueError, match="batch_size must be a multiple of the number of processes, 2"):
        make_source(load_dataset("digits"), tiny(batch_size=21), torch.device("cpu"), (0, 2), False, 0)


def launches(folder, program):
    """The folder of the program, which has a folder of runs for each launch, and the results of the launches."""
    options = {"env": program_environment(), "capture_output": True, "text": True, "timeout": PATIENCE, "check": False}
    done = subprocess.run([sys.executable, HELPERS / "moving_runs.py", folder, program], **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    return launches(tmp_path_factory.mktemp("moved runs"), "networks")


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    return launches(tmp_path_factory.mktemp("heads"), "heads")


def assert_same_curves(found, expected):
    """Sums are computed in another order."""
    for name in ("train_loss", "test_loss"):
        assert found.curves.get(name) == pytest.approx(expected.curves.get(name), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "processes", "strategy"),
    [("4 to 1", 1, "NO"), ("4 to 2", 2, "MULTI_CPU"), ("4 to 3", 3, "FSDP"), ("1 to 2", 2, "FSDP")],
)
def test_a_run_resumes_on_another_number_of_processes(moved, name, processes, strategy):
    """Sharded or not, before and after: the losses are those of one process without interruption."""
    folder, results = moved
    assert results[f"stopped on {name[0]}"]["codes"] == [130] * int(name[0])
    assert results[name]["codes"] == [0] * processes
    whole, run = (Run(the_run(folder / place)).record() for place in ("whole", name))
    assert (run.execution["processes"], run.execution["strategy"]) == (processes, strategy)
    assert run.resumed_at == [STOPPED]
    assert_same_curves(run, whole)
    assert not Run(the_run(folder / name)).checkpoints.files()


def test_a_sharded_run_has_a_shard_per_process(moved):
    (checkpoint,) = Run(the_run(moved[0] / "sharded")).checkpoints.files()
    assert checkpoint.name == f"step-{STOPPED:08d}"
    assert sorted(path.name for path in checkpoint.iterdir()) == [f"shard-{k}-of-4.safetensors" for k in range(4)]


def test_a_missing_shard_stops_all_processes_and_nothing_is_written(moved):
    folder, results = moved
    found = results["incomplete on 2"]
    assert found["codes"] == [2, 2]
    message = "step-00000005/shard-2-of-4.safetensors' is missing: the checkpoint needs all 4 shards\n"
    assert all(message in error for error in found["errors"] if error)
    before, after = (the_run(folder / name) for name in ("incomplete", "incomplete on 2"))
    for path in [path for path in before.rglob("*") if path.is_file()]:
        assert (after / path.relative_to(before)).read_bytes() == path.read_bytes()
    assert len([*before.rglob("*")]) == len([*after.rglob("*")])


def test_an_invalid_label_in_one_process_stops_all(moved):
    found = moved[1]["label"]
    assert found["codes"] == [2, 2]
    assert sorted(found["errors"]) == ["", "dcnet train: label 99 must be one of the 10 classes, from 0 to 9\n"]


def test_a_killed_process_ends_the_others(moved):
    found = moved[1]["kill"]
    assert found["codes"] == [1, -9]
    assert found["errors"][0] == f"dcnet train: {LOST}\n"
    assert found["seconds"] < 60


def test_a_process_that_does_not_answer_in_time_ends_the_others(moved):
    found = moved[1]["too slow"]
    assert found["codes"] == [1, 1]
    for error in filter(None, found["errors"]):
        assert error == f"dcnet train: {LOST}\n"
    assert any(found["errors"])


def test_a_slow_process_changes_nothing(moved):
    folder, results = moved
    assert results["slow"]["codes"] == [0, 0]
    assert_same_curves(*(Run(the_run(folder / name)).record() for name in ("slow", "whole")))


def assert_same_training(found, expected):
    """The runs are equal up to the order of sums: losses, accuracies, weights, and their record and file."""
    one, two = found.record(), expected.record()
    assert_same_curves(one, two)
    assert one.curves.train_accuracy == two.curves.train_accuracy
    assert one.curves.test_accuracy == two.curves.test_accuracy
    assert (one.hash, one.parameters, one.status) == (two.hash, two.parameters, "done")
    assert_close_tensors(load_file(found.model_file), load_file(expected.model_file))


def assert_close_tensors(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_a_sharded_head_resumes_on_another_number_of_processes(heads, processes):
    """The same losses and weights as without shards; --resume divides the classes again without the option."""
    folder, results = heads
    assert results["stopped on 4"]["codes"] == [130] * 4
    assert results[f"4 to {processes}"]["codes"] == [0] * processes
    run = Run(the_run(folder / f"4 to {processes}"))
    assert run.record().resumed_at == [STOPPED]
    assert (run.record().execution["processes"], run.record().execution["shard_head"]) == (processes, True)
    assert_same_training(run, Run(the_run(folder / "whole")))


def test_an_unsharded_head_resumes_as_a_sharded_one(heads):
    folder, results = heads
    assert results["1 to 2"]["codes"] == [0, 0]
    assert_same_training(Run(the_run(folder / "1 to 2")), Run(the_run(folder / "whole")))


def test_the_checkpoint_of_a_sharded_head_has_the_state_of_an_unsharded_one(heads):
    """Weights, moments of the optimizer, the share of the margin, and sums of the training losses."""
    (folder,), (file,) = (Run(the_run(heads[0] / name)).checkpoints.files() for name in ("sharded", "one"))
    shards = Shards.in_folder(folder)
    for name in ("model.network.head.weight", "optimizer.network.head.weight.exp_avg"):
        assert [part.lengths for part in shards.parts[name]] == [(2, 6), (3, 6), (2, 6), (3, 6)]
    found = {name: shards.read(name) for name in shards.sizes}
    assert_close_tensors(found, read_tensors(file)[0])


def test_a_sharded_head_in_bfloat16_trains_as_under_ddp(heads):
    """With biases and weight norms; bfloat16 rounds differently in one process."""
    folder, results = heads
    assert results["sharded softmax"]["codes"] == [0, 0, 0]
    assert_same_training(*(Run(the_run(folder / name)) for name in ("sharded softmax", "softmax")))


def test_a_sharded_head_starts_from_the_weights_of_a_run(heads):
    folder, results = heads
    assert results["pretrained on 3"]["codes"] == [0, 0, 0]
    found, expected = (Run(the_run(folder / name)) for name in ("pretrained on 3", "pretrained"))
    assert_same_training(found, expected)
    assert found.record().curves.train_loss[0] < Run(the_run(folder / "whole")).record().curves.train_loss[0]


def test_sampled_classes_are_reproducible(heads):
    """To the same bits on the same number of processes, with an interruption."""
    folder, results = heads
    assert results["sample"]["codes"] == results["resumed sample"]["codes"] == [0, 0]
    whole, resumed = (Run(the_run(folder / name)) for name in ("sample", "resumed sample"))
    assert resumed.record().resumed_at == [STOPPED]
    assert resumed.model_file.read_bytes() == whole.model_file.read_bytes()
    assert resumed.record().curves.test_loss == whole.record().curves.test_loss
    assert whole.record().hash != Run(the_run(folder / "whole")).record().hash


def test_the_test_accuracy_of_a_sharded_head_is_that_of_the_loaded_network(heads):
    """With batch normalization, whose running statistics are those of the first process."""
    model, record = load_model(Run(the_run(heads[0] / "sample")))
    reading = Evaluator(model, torch.device("cpu"))(batches_of(load_dataset("digits").test))
    assert reading.accuracy == pytest.approx(record.results.test_accuracy)
    assert reading.loss == pytest.approx(record.results.test_loss, rel=1e-5)


def test_a_sharded_head_under_fsdp_is_an_error_in_all_processes(heads):
    found = heads[1]["fsdp"]
    assert found["codes"] == [2, 2]
    message = "dcnet train: shard_head=True does not support FSDP (sharded weights): use DDP, or shard_head=False\n"
    assert set(found["errors"]) <= {"", message}
    assert any(found["errors"])


def test_a_full_disk_while_a_sharded_head_is_written_stops_all_processes(heads):
    found = heads[1]["full"]
    assert found["codes"] == [1, 1]
    assert any(found["errors"])
    for error in filter(None, found["errors"]):
        assert "No space left on device" in error
        assert error.count("\n") == 1


def test_a_gradient_of_one_shard_that_is_not_finite_stops_all_processes(heads):
    found = heads[1]["nan"]
    assert found["codes"] == [1, 1]
    for error in filter(None, found["errors"]):
        assert "all outputs are finite, but the gradient of 'network.head.weight' is not" in error


KILLED = [*COMMAND, "--checkpoint-every", "2", "--evaluate-every", "6"]


@pytest.mark.slow
def test_a_killed_process_is_restarted_and_the_losses_are_the_same(tmp_path):
    """Of two processes; torchrun restarts both, and the run resumes from its checkpoint."""
    done = launch(2, HELPERS / "killed_command.py", *KILLED, "--runs", tmp_path / "runs", options=["--max-restarts=1"])
    assert "Traceback" not in done.stderr
    assert done.stderr.count(LOST) <= 1
    assert (tmp_path / "killed").exists()
    assert compare_with_one_process(tmp_path).resumed_at == [4]


def compare_with_one_process(root):
    run = Run(the_run(root / "runs")).record()
    _, whole = train(tiny(**ALL, evaluate_every=6), root / "whole")
    assert (run.status, run.hash) == ("done", whole.hash)
    assert_same_curves(run, whole)
    return run


@pytest.mark.slow
def test_two_nodes_have_the_loss_curve_of_one_process(tmp_path):
    """Two launchers with two processes each meet on this machine."""
    place = ["--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-id=7"]
    command = [sys.executable, "-m", "torch.distributed.run", *place, f"--rdzv-endpoint=localhost:{free_port()}"]
    command += ["-m", "dcnet", *COMMAND, "--evaluate-every", "6", "--runs", tmp_path / "runs"]
    # As the docs advise: otherwise a restart finds the addresses of ended processes in the store.
    environment = {**program_environment(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    options = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    nodes = [subprocess.Popen([*map(str, command)], **options) for _ in range(2)]
    try:
        outputs = [node.communicate(timeout=PATIENCE)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], outputs
    run = compare_with_one_process(tmp_path)
    assert run.execution["processes"] == 4
