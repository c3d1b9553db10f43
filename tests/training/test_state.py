"""The state of training moves between numbers of processes; bad shards change nothing."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.moving_state import CLASSES, FEATURES, SAVED
from helpers.processes import PATIENCE, TESTS, program_environment
from safetensors.torch import load_file
from torch import nn

from dcnet.losses import MarginSoftmax, ShardedMarginSoftmax
from dcnet.parameters import Learnable
from dcnet.training import archive_state, load_archive, load_state, save_state
from dcnet.training.tensor_files import read_tensors, write_tensors

WORLDS = [1, 2, 3, 8]
STEP = f"step-{SAVED:08d}"


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    """The folder of the program, after it ran on all numbers of processes."""
    folder = tmp_path_factory.mktemp("moved")
    command = [sys.executable, TESTS / "helpers" / "moving_state.py", folder]
    options = {"capture_output": True, "text": True, "timeout": PATIENCE, "check": False}
    done = subprocess.run(command, env=program_environment(), **options)
    assert done.returncode == 0, done.stderr[-3000:]
    # No warnings and no tracebacks of expected errors.
    assert done.stderr == ""
    return folder


def results(folder, world):
    return [torch.load(folder / str(world) / f"{rank}.pt") for rank in range(world)]


def joined(found, key):
    """The values of all processes: rows of the heads after one another, and everything else, which must be equal."""
    whole = {}
    for name, value in found[0][key].items():
        values = [each[key][name] for each in found]
        if name.startswith("heads.") and value.dim() and name.split(".")[2] in ("weight", "bias"):
            whole[name] = torch.cat(values)
        else:
            assert all(torch.equal(value, other) for other in values), name
            whole[name] = value
    return whole


@pytest.mark.parametrize("world", WORLDS)
def test_weights_and_optimizer_state_move(moved, world):
    expected, found = results(moved, 4), results(moved, world)
    before, after = joined(expected, "saved"), joined(found, "saved")
    assert before.keys() == after.keys()
    assert len(before["heads.centers.weight"]) == 2 * CLASSES
    for name, value in before.items():
        assert torch.equal(after[name], value), name
    assert any(name.endswith("mean_norm") for name in before)
    assert any(name.endswith("radius.exp_avg_sq") for name in before)
    for each in found:
        assert each["returned"] == (SAVED, {"at": SAVED, "list": [1, None]})
        assert each["rates"] == [0.02, *[0.05] * (len(each["rates"]) - 1)]


@pytest.mark.parametrize("world", WORLDS)
def test_training_continues_with_the_same_losses(moved, world):
    """With weight projection, learned radii and mean norms; the sums are in another order."""
    expected = results(moved, 4)[0]["losses"]
    for each in results(moved, world):
        assert each["losses"] == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("world", WORLDS)
def test_an_archive_has_the_weights_of_all_processes(moved, world):
    archive, saved = load_file(moved / "archive.safetensors"), joined(results(moved, 4), "saved")
    found = joined(results(moved, world), "archived")
    assert found.keys() == archive.keys()
    for name, value in archive.items():
        assert torch.equal(saved[name], value), name
        assert torch.equal(found[name], value), name
    assert torch.equal(archive["heads.centers.weight"], results(moved, 4)[2]["full"])


def test_an_archive_loads_into_an_unsharded_head(moved):
    head = MarginSoftmax(FEATURES, CLASSES, "subcenter-arcface(k=2)", Learnable(8.0), "auto").double()
    found = load_file(moved / "archive.safetensors")
    own = {name.removeprefix("heads.centers."): value for name, value in found.items() if "heads.centers." in name}
    head.load_state_dict(own)
    assert torch.equal(head.weight, results(moved, 4)[0]["full"])


@pytest.mark.parametrize("world", WORLDS)
def test_all_processes_raise_for_bad_shards_and_nothing_changes(moved, world):
    shard = f"damaged/{STEP}/shard-1-of-4.safetensors"
    expected = {
        "damaged": f"'{moved}/{shard}' is damaged: the checksum does not match its contents",
        "missing": f"'{moved}/missing/{STEP}/shard-2-of-4.safetensors' is missing: the checkpoint needs all 4 shards",
        "classes": "'model.heads.centers.weight' has the shape [38, 6] in this network, but [22, 6] in "
        f"'{moved}/state/{STEP}/shard-0-of-4.safetensors'",
    }
    for each in results(moved, world):
        assert each["errors"] == expected
        assert each["unchanged"]


class Rows:
    """A small state in one process, and its copy with another number of shards or another step."""

    def __init__(self):
        torch.manual_seed(0)
        self.head = ShardedMarginSoftmax(3, 5, "arcface")
        self.optimizer = torch.optim.Adam(self.head.parameters())
        self.head(torch.randn(2, 3), torch.tensor([0, 4])).backward()
        self.optimizer.step()

    def save(self, folder, step=1):
        return save_state(folder, step, self.head, self.optimizer)

    def load(self, folder):
        return load_state(folder, self.head, self.optimizer)


def contents(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def two_steps(moved, folder):
    """A checkpoint of four shards, one of them of the step before."""
    shutil.copytree(moved / "state" / STEP, folder / STEP)
    name = "shard-3-of-4.safetensors"
    shutil.copy(moved / "state" / f"step-{SAVED - 1:08d}" / name, folder / STEP / name)
    steps = rf"{name}' is of step {SAVED - 1}, but '.*shard-0-of-4.safetensors' of step {SAVED}"
    return rf"{steps}: all shards must belong to one save"


def two_counts(moved, folder):
    shutil.copytree(moved / "state" / STEP, folder / STEP)
    shutil.copy(folder / STEP / "shard-0-of-4.safetensors", folder / STEP / "shard-0-of-2.safetensors")
    return rf"{STEP}' has shards of 2 and of 4 processes: a checkpoint must have the shards of one save"


def renamed(moved, folder):
    shutil.copytree(moved / "state" / STEP, folder / STEP)
    shutil.copy(folder / STEP / "shard-0-of-4.safetensors", folder / STEP / "shard-1-of-4.safetensors")
    return "shard-1-of-4.safetensors' was renamed after it was written"


def none_left(moved, folder):
    (folder / STEP).mkdir(parents=True)
    return rf"{STEP}' has no shards"


def cut(moved, folder):
    shutil.copytree(moved / "state" / STEP, folder / STEP)
    path = folder / STEP / "shard-1-of-4.safetensors"
    path.write_bytes(path.read_bytes()[:-20])
    return "shard-1-of-4.safetensors' is not a whole file of tensors: it ends before its last tensor"


def another_network(moved, folder):
    shutil.copytree(moved / "state" / STEP, folder / STEP)
    return r"shard-0-of-4.safetensors' is of another network: it lacks \['model.eased_in'"


def crafted(moved, folder):
    """Offsets outside the whole tensor."""
    shutil.copytree(moved / "state" / STEP, folder / STEP)
    path = folder / STEP / "shard-1-of-4.safetensors"
    tensors, notes = read_tensors(path)
    notes["parts"]["model.heads.biased.weight"]["offsets"] = [10**9, 0]
    write_tensors(path, tensors, notes)
    return "shard-1-of-4.safetensors' does not say which part of 'model.heads.biased.weight' it has"


@pytest.mark.parametrize("bad", [two_steps, two_counts, renamed, none_left, cut, another_network, crafted])
def test_bad_shards_raise_one_sentence_and_change_nothing(moved, tmp_path, bad):
    rows, message = Rows(), bad(moved, tmp_path)
    before, files = rows.head.weight.clone(), contents(tmp_path)
    with pytest.raises(ValueError, match=message) as raised:
        rows.load(tmp_path)
    assert "\n" not in str(raised.value)
    assert torch.equal(rows.head.weight, before)
    assert contents(tmp_path) == files
    assert len(rows.optimizer.state) == 1


def test_without_a_checkpoint_nothing_is_loaded(tmp_path):
    assert Rows().load(tmp_path / "none") == (0, {})
    with pytest.raises(ValueError, match=r"none' has no checkpoint of save_state"):
        archive_state(tmp_path / "none", tmp_path / "archive.safetensors")


def test_the_two_newest_steps_are_kept(tmp_path):
    rows = Rows()
    for step in (1, 5, 20):
        rows.save(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000005", "step-00000020"]
    assert rows.load(tmp_path) == (20, {})
    assert load_state(tmp_path, rows.head, rows.optimizer, step=5) == (5, {})
    with pytest.raises(ValueError, match=r"has no state of step 7: its steps are 5, 20$"):
        load_state(tmp_path, rows.head, rows.optimizer, step=7)
    rows.save(tmp_path, 20)
    assert rows.load(tmp_path) == (20, {})


def test_an_earlier_step_is_not_saved_beside_a_later_one(tmp_path):
    """After a return to step 20, `load_state` would load step 30 again, and later saves would remove step 25."""
    rows = Rows()
    for step in (20, 30):
        rows.save(tmp_path, step)
    load_state(tmp_path, rows.head, rows.optimizer, step=20)
    files = contents(tmp_path)
    message = r"has a state of step 30, which is later than step 25: save to another folder, or move the later states"
    with pytest.raises(ValueError, match=message):
        rows.save(tmp_path, 25)
    assert contents(tmp_path) == files
    (tmp_path / "step-00000030").rename(tmp_path / "abandoned")
    rows.save(tmp_path, 25)
    assert rows.load(tmp_path)[0] == 25


def test_a_failed_save_leaves_the_checkpoint_before_it(tmp_path, monkeypatch):
    rows = Rows()
    rows.save(tmp_path)
    files = contents(tmp_path)

    def full(file):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match=r"No space left on device: '.*shard-0-of-1"):
            rows.save(tmp_path, 2)
    assert {path: content for path, content in contents(tmp_path).items() if "tmp" not in path.parts[-2]} == files
    assert rows.load(tmp_path)[0] == 1
    rows.save(tmp_path, 2)
    assert rows.load(tmp_path)[0] == 2


def test_state_that_cannot_be_divided_by_classes_is_an_error(tmp_path):
    rows = Rows()
    rows.optimizer.state[rows.head.weight]["columns"] = torch.ones(3)
    with pytest.raises(ValueError, match=r"state 'columns' of 'weight' has the shape \[3\].*expected 5 rows"):
        rows.save(tmp_path)


def test_an_archive_of_another_network_is_an_error(tmp_path):
    file = tmp_path / "archive.safetensors"
    save_state(tmp_path / "state", 1, ShardedMarginSoftmax(3, 5, "arcface"))
    archive_state(tmp_path / "state", file)
    with pytest.raises(
        ValueError, match=r"'weight' has the shape \[6, 3\] in this network, but \[5, 3\] in '.*archive"
    ):
        load_archive(file, ShardedMarginSoftmax(3, 6, "arcface"))
    with pytest.raises(ValueError, match=r"archive.safetensors' is of another network: it lacks 'bias'"):
        load_archive(file, nn.Linear(3, 5))
    header = file.read_bytes()
    assert "dcnet" in json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])["__metadata__"]


def test_compiled_networks_have_the_same_names(tmp_path):
    network = nn.Linear(3, 2)
    save_state(tmp_path, 1, {"network": torch.compile(network, backend="eager")})
    found = nn.Linear(3, 2)
    assert load_state(tmp_path, {"network": found}) == (1, {})
    assert torch.equal(found.weight, network.weight)
