"""The open-set recipes: from images to a record with evaluations."""

from pathlib import Path

import pytest
import torch

from dcnet.data import Dataset, Split
from dcnet.data.cifar import OpenSet
from dcnet.training import Execution, Run, Trainer, add_evaluation, load_model, recipe
from dcnet.training.recipes import command_of
from dcnet.verification import open_set_measures

SMALL = {"width": 0.03, "features": 8, "steps": 3, "batch_size": 8, "precision": "float32"}


def images(count: int, classes: int, side: int) -> Split:
    pixels = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8)
    return Split(pixels, torch.arange(count) % classes)


def made(side: int) -> OpenSet:
    known = Dataset("made", images(16, 4, side), images(8, 4, side), tuple("abcd"))
    return OpenSet(known, images(18, 3, side), tuple("efg"))


@pytest.mark.parametrize(
    ("name", "side", "operator", "margin"),
    [
        ("faces", 96, "conv", "a-softmax"),
        ("faces", 96, "tanh-cos", "arcface"),
        ("open-set", 32, "tanh-cos", "sphereface-r"),
    ],
)
def test_open_set_recipes_train_and_evaluate_on_unseen_classes(
    name: str, side: int, operator: str, margin: str, tmp_path: Path
):
    config, parts = recipe(name, operator=operator, margin=margin, **SMALL), made(side)
    run = Run(tmp_path / "run")
    record = Trainer(config, run, Execution(device="cpu"), dataset=parts.known).run()
    assert record.status == "done"
    model, _ = load_model(run)
    found = open_set_measures(model, parts, pairs=20, enrolled=2, known=2)
    add_evaluation(run, name, found)
    assert run.record().evaluations[name].to_json() == found


@pytest.mark.parametrize("name", ["faces", "open-set"])
def test_open_set_recipes_center_pixels_and_scale_milestones(name: str):
    config = recipe(name)
    ends = [(pixel - config.pixel_mean[0]) / config.pixel_std[0] for pixel in (0.0, 1.0)]
    assert ends == pytest.approx([-127.5 / 128, 127.5 / 128])
    assert all(0 < milestone < config.steps for milestone in config.schedule.milestones)
    shorter = recipe(name, steps=config.steps // 10, margin="softmax")
    assert max(shorter.schedule.milestones) < shorter.steps
    assert command_of(shorter) == f"dcnet train --recipe {name} --margin softmax --steps {shorter.steps}"
