"""Files of earlier and interrupted runs: damaged checkpoints, replaced runs, pretrained statistics."""

import os

import pytest
import torch
from helpers.small_runs import ON_CPU, InterruptsAt, Remembers, tiny, train

from dcnet.cli.app import main
from dcnet.training import DivergenceError, Execution, Run, Trainer, load_model
from dcnet.training.checkpoints import Checkpoints
from dcnet.training.session import Session
from dcnet.training.setup import Setup
from dcnet.training.trainer import READ_EVERY

SMALL = ["--train-images", "60", "--batch-size", "20", "--width", "0.1", "--epochs", "1", "--device", "cpu"]


def test_damaged_checkpoints_of_later_steps_are_removed(tmp_path):
    config = tiny(epochs=3)
    run, _ = train(config, tmp_path, callback=InterruptsAt(8))
    for file in run.checkpoints.files():
        file.write_bytes(b"")
    damaged = [file.name for file in run.checkpoints.files()]
    assert damaged
    run, record = train(config, tmp_path, callback=InterruptsAt(4))
    assert record.steps_done == 4
    assert [file.name for file in run.checkpoints.files()] == ["step-00000004.safetensors"]
    assert Trainer(config, run, ON_CPU).done == 4


def test_an_unreadable_checkpoint_ends_the_run_and_is_kept(tmp_path, capsys):
    config = tiny(epochs=3)
    run, _ = train(config, tmp_path, callback=InterruptsAt(4))
    good = {file: file.read_bytes() for file in run.checkpoints.files()}
    newer = run.checkpoints.folder / "step-00000008.safetensors"
    newer.mkdir()
    assert Session([(config, run)], ON_CPU).run() == 1
    assert capsys.readouterr().err.startswith(f"dcnet train: Is a directory: '{newer}'\n")
    assert {file: file.read_bytes() for file in good} == good
    assert run.record().status == "interrupted"


def test_a_path_that_is_not_utf8_is_an_error_at_the_start(tmp_path, capsys):
    root = tmp_path / os.fsdecode(b"caf\xe9")
    assert main(["train", *SMALL, "--runs", str(root)]) == 2
    assert capsys.readouterr().err.startswith(f"dcnet train: the path '{tmp_path}/caf\\udce9/")
    assert not list(tmp_path.rglob("record.json"))


def test_a_later_session_removes_checkpoints_of_a_finished_run(tmp_path, monkeypatch):
    """The run was killed after its last write, before it removed its checkpoints."""
    config = tiny(epochs=2)
    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "clear", lambda self: None)
        run, _ = train(config, tmp_path, execution=Execution(device="cpu", checkpoint_every=1))
    assert run.checkpoints.files()
    assert Session([(config, run)], ON_CPU).run() == 0
    assert not run.checkpoints.folder.exists()


def test_again_keeps_the_old_run_until_the_first_step(tmp_path, monkeypatch):
    run, _ = train(tiny(epochs=1), tmp_path)
    before = {file: file.read_bytes() for file in (run.record_file, run.model_file)}
    right = Setup.train_step

    def fails(setup, step, losses):
        raise RuntimeError("expected another size")

    def diverges(setup, step, losses):
        torch.nn.init.constant_(next(setup.model.parameters()), float("nan"))
        right(setup, step, losses)

    for train_step, expected in ((fails, RuntimeError), (diverges, DivergenceError)):
        monkeypatch.setattr(Setup, "train_step", train_step)
        with pytest.raises(expected):
            train(tiny(epochs=1), tmp_path, again=True)
    assert {file: file.read_bytes() for file in before} == before


def test_speed_excludes_the_starting_steps_of_each_part(tmp_path):
    config = tiny(steps=24)
    for step in (4, 8, 12):
        train(config, tmp_path, callback=InterruptsAt(step))
    _, record = train(config, tmp_path)
    seconds = record.timings.training
    # The last part has 12 steps, of which the first five are not timed.
    assert record.timings.images_per_second == pytest.approx(7 * 20 / seconds)
    assert record.timings.step_ms == pytest.approx(1000 * seconds / 7)


def test_speed_excludes_the_first_steps_of_each_image_size(tmp_path):
    config = tiny(steps=24, model="speednet", progressive_sizes="4:0.5,6:0.6")
    train(config, tmp_path, callback=InterruptsAt(10))
    _, record = train(config, tmp_path)
    # Timed are steps 5 to 9 and, after the changes at 12 and 14, those from 19 on.
    assert record.timings.step_ms == pytest.approx(1000 * record.timings.training / 10)


def test_the_device_is_waited_for_before_the_image_size_changes(tmp_path, monkeypatch):
    """Otherwise the time of its queued work would be that of a start; on a GPU the meter is read every 50 steps."""
    monkeypatch.setitem(READ_EVERY, "cpu", 50)
    seen = Remembers()
    train(tiny(steps=24, evaluate_every=24, model="speednet", progressive_sizes="4:0.5"), tmp_path, callback=seen)
    assert [done for done, _ in seen.looks] == [1, 2, 3, 4, 5, 12, 13, 14, 15, 16, 17, 24]


def test_again_replaces_a_run_with_a_damaged_record(tmp_path, capsys):
    words = ["train", *SMALL, "--runs", str(tmp_path)]
    assert main(words) == 0
    (record,) = tmp_path.glob("*/record.json")
    record.write_text("")
    assert main(words) == 2
    assert main([*words, "--again"]) == 0
    assert Run(record.parent).done


def test_pretrained_statistics_are_reset_for_another_operator(tmp_path):
    before, _ = train(tiny(epochs=3), tmp_path)

    def variances(operator):
        config = tiny(steps=1, lr=1e-12, norm_momentum=1e-6, operator=operator, pretrained=str(before.folder))
        model = Trainer(config, Run.of(config, tmp_path), ON_CPU).setup
        model.model.train()
        model.init_statistics()
        return [value for name, value in model.model.named_buffers() if name.endswith("running_var")]

    kept = variances("tanh-cos")
    own = [value for name, value in load_model(before)[0].named_buffers() if name.endswith("running_var")]
    assert all(torch.equal(one, two) for one, two in zip(kept, own, strict=True))
    assert not any(torch.allclose(one, two) for one, two in zip(variances("sphere-cos"), own, strict=True))


def initial_mean_norms(operator, before, folder):
    config = tiny(steps=1, operator=operator, pretrained=str(before.folder))
    model = Trainer(config, Run.of(config, folder), ON_CPU).setup.model
    return [value.item() for name, value in model.named_buffers() if name.endswith("mean_norm")]


def test_pretrained_mean_norms_are_reset_for_another_operator(tmp_path):
    """With a decay of 0.999 old mean norms would outlast a short training, and evaluation would be at chance."""
    before, _ = train(tiny(epochs=1), tmp_path)
    assert min(initial_mean_norms("tanh-cos", before, tmp_path)) > 0
    assert set(initial_mean_norms("tanh-sqcos", before, tmp_path)) == {0.0}


def test_mean_norms_of_a_converted_run_belong_to_the_operator_of_its_source(tmp_path):
    before, _ = train(tiny(epochs=1), tmp_path)
    out = tmp_path / "converted"
    assert main(["convert", str(before.folder), "--operator", "tanh-sqcos", "--out", str(out)]) == 0
    held = [value for name, value in load_model(Run(out))[0].named_buffers() if name.endswith("mean_norm")]
    assert min(held) > 0
    assert set(initial_mean_norms("tanh-sqcos", Run(out), tmp_path)) == {0.0}
    again = tmp_path / "again"
    assert main(["convert", str(out), "--operator", "ball-cos", "--out", str(again)]) == 0
    assert set(initial_mean_norms("tanh-sqcos", Run(again), tmp_path)) == {0.0}
    assert min(initial_mean_norms("tanh-cos", Run(again), tmp_path)) > 0
