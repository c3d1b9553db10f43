"""The hunt for the setup of Tables 7 and 8: what each variant attacks, and what each setting changes."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from dcnet.data import Augmentation
from dcnet.experiments import get_experiment
from dcnet.experiments.catalogue import attack_hunt
from dcnet.experiments.catalogue.attack_hunt import SETTINGS, VARIANTS, InBatches, Setting, Variant
from dcnet.experiments.catalogue.attack_tables import BIM_STEPS, EPSILON, SOURCE_SEEDS, predictions
from dcnet.experiments.experiment import evaluations
from dcnet.experiments.reproduction import smoke_test
from dcnet.robustness import accuracy, perturb
from dcnet.robustness.report_card import evaluate_attacks
from dcnet.training import Record


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    model.train()(3 * torch.rand(64, 1, 8, 8))
    return model.eval()


@pytest.fixture
def attacked():
    torch.manual_seed(9)
    return network(0), torch.rand(300, 1, 8, 8), torch.randint(10, (300,)), network(1)


def test_without_changes_it_is_the_attack_of_the_tables(attacked):
    model, images, labels, source = attacked
    found = Variant().measure(model, images, labels, source)
    usual = evaluate_attacks(model, images, labels, source, epsilon=EPSILON, steps=BIM_STEPS)
    assert {name: usual[name] for name in found} == found


def fgsm_by_hand(model, images, loss):
    images = images.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(model(images)), images)
    return (images + EPSILON * gradient.sign()).clamp(0, 1).detach()


def smoothed_loss(logits, labels):
    target = 0.99 * nn.functional.one_hot(labels, 10) + 0.01 / 10
    return -(target * (logits.softmax(1) + 1e-4).log()).sum()


def same_share(images, others):
    return (images - others).abs().lt(1e-6).double().mean().item()


@pytest.mark.parametrize("name", ["hunt-own-answers", "hunt-training-loss", "hunt-batch-statistics"])
@pytest.mark.parametrize("box", ["white_box", "black_box"])
def test_fgsm_by_hand(attacked, name, box):
    """Each variant gives other images than the usual attack, and leaves the networks unchanged."""
    model, images, labels, source = attacked
    # Large logits, for which smoothing and floor have an effect.
    for each in (model, source):
        each[4].weight.data *= 100
    images, labels = images[:128], labels[:128]
    victim = model if box == "white_box" else source
    before, answers = copy.deepcopy(victim.state_dict()), predictions(victim, images)
    losses = {
        "hunt-own-answers": lambda logits: nn.functional.cross_entropy(logits, answers, reduction="sum"),
        "hunt-training-loss": lambda logits: smoothed_loss(logits, labels),
        "hunt-batch-statistics": lambda logits: nn.functional.cross_entropy(logits, labels, reduction="sum"),
    }
    seen = copy.deepcopy(victim).train(name == "hunt-batch-statistics")
    expected = fgsm_by_hand(seen, images, losses[name])
    moved = VARIANTS[name].perturbed(model, images, labels, victim, "fgsm")
    assert same_share(moved, expected) > 0.999
    usual = perturb(model, images, labels, "fgsm", epsilon=EPSILON, source=victim)
    assert same_share(usual, expected) < 0.99
    found = VARIANTS[name].measure(model, images, labels, source)
    assert found[box]["fgsm"] == accuracy(model, moved, labels)
    assert found["clean"] == accuracy(model, images, labels)
    assert all(torch.equal(value, before[key]) for key, value in victim.state_dict().items())


def test_a_single_image_uses_running_statistics(attacked):
    """It has no statistics in a fully connected layer."""
    model, images, *_ = attacked
    assert torch.equal(InBatches(model)(images[:1]), model(images[:1]))
    assert not torch.allclose(InBatches(model)(images[:2]), model(images[:2]))


def test_sources_of_evaluations(monkeypatch, tmp_path, attacked):
    model, images, labels, source = attacked
    loaded = []
    monkeypatch.setattr(attack_hunt, "load_model", lambda run: (loaded.append(run.folder.name), (source, {}))[1])
    monkeypatch.setattr(attack_hunt, "load_test_images", lambda *_: (images, labels))
    config = Setting().config("tanh")
    for name, operator in {"hunt-own-answers": "conv", "hunt-decoupled-source": "tanh-cos"}.items():
        found = evaluations[name](model, Record(config=config.described()), tmp_path, None)
        assert found == VARIANTS[name].measure(model, images, labels, source)
        expected = dataclasses.replace(config, operator=operator, seed=SOURCE_SEEDS)
        assert loaded.pop() == f"{expected.name}-{expected.hash}"


def test_sources_of_all_settings_are_trained():
    table = get_experiment("attack_hunt")
    runs = {config for cell in table.cells for config in cell.configs(1)}
    for cell in table.cells:
        if cell.evaluation is not None:
            (config,) = cell.configs(1)
            assert VARIANTS.get(cell.evaluation, Variant()).source_of(config) in runs


def test_settings_change_what_they_say():
    base = {network: Setting().config(network) for network in ("baseline", "sphere", "ball", "tanh")}
    changed = {}
    for name, setting in SETTINGS.items():
        for network in setting.operators:
            config = setting.config(network)
            own, usual = (dataclasses.asdict(one) for one in (config, base[network]))
            changed.setdefault(name, {})[network] = {key: own[key] for key in own if own[key] != usual[key]}
    same = {key: {} for key in base}
    for name in ("as in Tables 7 and 8", "attack on own answers", "attack on the training loss", "batch statistics"):
        assert changed.pop(name) == same
    assert changed.pop("decoupled source") == {name: {} for name in ("sphere", "ball", "tanh")}
    flips = dataclasses.asdict(Augmentation(flip=True))
    assert changed.pop("flips only") == {key: {"augmentation": flips} for key in base}
    bare = {"augmentation": flips, "model": "cnn9-small-bare"}
    assert changed.pop("flips only, bare") == dict.fromkeys(base, bare)
    assert changed.pop("no batch normalization") == {key: {"norm": "none"} for key in base}
    assert changed.pop("no ReLU") == {key: {"activation": "none"} for key in base}
    assert changed.pop("no smoothing, no floor") == {key: {"label_smoothing": 0.0, "log_floor": 0.0} for key in base}
    assert changed.pop("square cosine")["ball"] == {"operator": "ball-sqcos"}
    assert changed.pop("fixed radius")["tanh"] == {"operator": "tanh(radius=Radius(learnable=False))-cos"}
    assert changed.pop("fixed, absolute radius")["tanh"] == {"operator": "tanh(radius=1)-cos"}
    assert not changed


def test_numbers_of_the_paper():
    table = get_experiment("attack_hunt")
    assert [table.cell("no ReLU: clean", name).paper for name in ("baseline", "tanh")] == [85.35, 91.45]
    assert [table.cell("flips only: FGSM", name).paper for name in ("sphere", "ball")] == [43.64, 50.47]
    assert table.cell("no ReLU: BIM", "tanh").paper == 10.18
    assert table.cell("square cosine: black-box FGSM", "ball").paper == 49.50
    assert smoke_test(table).cell("no ReLU: clean", "tanh").paper is None
