"""Adversarial training: adversarial images, losses, unchanged buffers and gradients, specs."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers.small_runs import InterruptsAt, Remembers, tiny, train
from torch import nn

from dcnet.training.adversarial import FGSM, NFGSM, PGD, TRADES, Target, adversaries, as_adversary
from dcnet.training.build import build_model
from dcnet.training.step import Objective

EPSILON = 0.1


class Small(nn.Module):
    """A network without normalization, so that images do not affect each other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 36, 10)).double()

    def forward(self, images):
        return self.layers(images)


class Seen:
    """Computes the loss of a batch, and records its images."""

    def __init__(self):
        self.images = []

    def __call__(self, network, images, labels):
        self.images.append(images)
        logits = network(images)
        return F.cross_entropy(logits, labels), logits


def batch(count=6):
    torch.manual_seed(1)
    return torch.rand(count, 1, 8, 8, dtype=torch.float64), torch.arange(count)


def target(network):
    return Target(network, network, network)


def stepped(network, images, labels, epsilon):
    """Returns images after one step of FGSM, computed image by image."""
    found = []
    for image, label in zip(images, labels, strict=True):
        pixels = image[None].clone().requires_grad_()
        loss = -network(pixels).log_softmax(1)[0, label]
        loss.backward()
        found.append((pixels.detach() + epsilon * pixels.grad.sign()).clamp(0, 1))
    return torch.cat(found)


def test_fgsm_takes_one_step_and_averages_both_losses():
    network, (images, labels) = Small(), batch()
    loss, logits = FGSM(epsilon=EPSILON).loss(seen := Seen(), target(network), images, labels)
    changed = stepped(network, images, labels, EPSILON)
    assert torch.equal(seen.images[0], torch.cat([images, changed]))
    by_hand = (F.cross_entropy(network(images), labels) + F.cross_entropy(network(changed), labels)) / 2
    assert torch.allclose(loss, by_hand)
    assert torch.allclose(logits, network(images))


@pytest.mark.parametrize(
    "adversary", [FGSM(EPSILON), NFGSM(EPSILON), PGD(EPSILON, steps=2), TRADES(EPSILON, steps=2)], ids=str
)
def test_parameters_are_frozen_during_the_attack(adversary):
    network, (images, labels) = Small(), batch()
    frozen = next(network.parameters()).requires_grad_(False)
    seen = []
    network.register_forward_hook(lambda *_: seen.append([each.requires_grad for each in network.parameters()]))
    adversary.loss(Seen(), target(network), images, labels)[0].backward()
    *attacked, trained = seen
    assert attacked
    assert not any(any(wanted) for wanted in attacked)
    assert trained == [each is not frozen for each in network.parameters()]
    assert all((each.grad is None) == (each is frozen) for each in network.parameters())


def test_share_weights_the_two_losses():
    network, (images, labels) = Small(), batch()
    changed = stepped(network, images, labels, EPSILON)
    losses = [F.cross_entropy(network(of), labels) for of in (images, changed)]
    weighed, _ = FGSM(epsilon=EPSILON, share=0.25).loss(Seen(), target(network), images, labels)
    assert torch.allclose(weighed, 0.75 * losses[0] + 0.25 * losses[1])
    alone, logits = FGSM(epsilon=EPSILON, share=1).loss(Seen(), target(network), images, labels)
    assert torch.allclose(alone, losses[1])
    assert torch.allclose(logits, network(changed))


def test_fgsm_with_predicted_steps_away_from_the_prediction():
    network, (images, labels) = Small(), batch()
    FGSM(epsilon=EPSILON, predicted=True).loss(seen := Seen(), target(network), images, labels)
    answers = network(images).argmax(1)
    assert not torch.equal(answers, labels)
    assert torch.equal(seen.images[0][len(images) :], stepped(network, images, answers, EPSILON))


def test_predicted_needs_no_extra_pass():
    network, (images, labels) = Small(), batch()
    attacked = []

    def counted(given):
        attacked.append(given)
        return network(given)

    for predicted in (False, True):
        attacked.clear()
        adversary = FGSM(epsilon=EPSILON, predicted=predicted)
        adversary.loss(Seen(), Target(network, counted, network), images, labels)
        assert len(attacked) == 1
        assert adversary.cost == 3.0


@pytest.mark.parametrize("noise", [0.0, 0.5, 2.0])
def test_n_fgsm_adds_noise_and_one_step_without_projection(noise):
    network, (images, labels) = Small(), batch()
    torch.manual_seed(3)
    uniform = torch.rand_like(images)
    torch.manual_seed(3)
    loss, logits = NFGSM(EPSILON, noise=noise).loss(seen := Seen(), target(network), images, labels)
    noisy = images.clone()
    for place, value in enumerate(uniform.flatten().tolist()):
        pixel = images.flatten()[place].item() + noise * EPSILON * (2 * value - 1)
        noisy.view(-1)[place] = min(max(pixel, 0.0), 1.0)
    changed = stepped(network, noisy, labels, EPSILON)
    (given,) = seen.images
    torch.testing.assert_close(given, changed, rtol=0, atol=1e-12)
    assert torch.allclose(loss, F.cross_entropy(network(changed), labels))
    assert torch.allclose(logits, network(changed))
    largest = (given - images).abs().max().item()
    assert (largest > 1.3 * EPSILON) == (noise > 0)
    assert largest <= (1 + noise) * EPSILON + 1e-12


def test_pgd_has_a_higher_loss_than_fgsm_within_epsilon():
    network, (images, labels) = Small(), batch()
    PGD(epsilon=EPSILON, steps=20, step=EPSILON / 5).loss(seen := Seen(), target(network), images, labels)
    (changed,) = seen.images
    assert (changed - images).abs().max() <= EPSILON + 1e-12
    assert changed.min() >= 0
    assert changed.max() <= 1
    loss = [F.cross_entropy(network(of), labels) for of in (images, stepped(network, images, labels, EPSILON), changed)]
    assert loss[2] >= loss[1] > loss[0]


def test_the_random_start_of_pgd_depends_on_the_seed():
    network, (images, labels) = Small(), batch()
    found = []
    for seed in (0, 1, 0):
        torch.manual_seed(seed)
        PGD(epsilon=EPSILON, steps=1, step=1e-9).loss(seen := Seen(), target(network), images, labels)
        found.append(seen.images[0])
    assert torch.equal(found[0], found[2])
    assert not torch.allclose(found[0], found[1])


def test_trades_adds_beta_times_the_divergence():
    network, (images, labels) = Small(), batch()
    given = []

    def trained(both):
        given.append(both)
        return network(both)

    adversary = TRADES(epsilon=EPSILON, beta=3.0, steps=5, step=EPSILON / 3)
    loss, logits = adversary.loss(Seen(), Target(trained, network, network), images, labels)
    changed = given[0][len(images) :]
    assert (changed - images).abs().max() <= EPSILON + 1e-12
    p, q = network(images).softmax(1), network(changed).softmax(1)
    divergence = sum((a * (a / b).log()).sum() for a, b in zip(p, q, strict=True)) / len(images)
    assert divergence > 0
    assert loss.item() == pytest.approx((F.cross_entropy(network(images), labels) + 3 * divergence).item(), rel=1e-5)
    assert torch.allclose(logits, network(images).float())


def network_that_tracks():
    torch.manual_seed(0)
    return build_model(tiny(operator="tanh-cos"), 10, 1, 8).train()


@pytest.mark.parametrize("name", sorted(adversaries))
def test_attacks_change_no_gradients_and_buffers(name):
    network, (images, labels) = network_that_tracks(), batch()
    images = images.float()
    given = []

    def trained(both):
        given.append(both)
        return network(both)

    loss, _ = as_adversary(name).loss(Seen(), Target(trained, network, network), images, labels)
    assert all(parameter.grad is None for parameter in network.parameters())
    loss.backward()
    assert all(parameter.grad is not None for parameter in network.parameters() if parameter.requires_grad)
    # The buffers are those after one pass over the images of training.
    (both,) = given
    once = network_that_tracks()
    once(both)
    for (key, buffer), expected in zip(network.named_buffers(), once.buffers(), strict=True):
        assert torch.equal(buffer, expected), key


@pytest.mark.parametrize("name", sorted(adversaries))
def test_adversarial_runs_resume_to_the_same_bits(name, tmp_path):
    config = tiny(steps=6, adversary=f"{name}(epsilon=0.1)")
    whole, record = train(config, tmp_path / "whole")
    assert record.config["adversary"] == f"{name}(epsilon=0.1)"
    assert name in whole.folder.name
    train(config, tmp_path / "halves", callback=InterruptsAt(3))
    halves, record = train(config, tmp_path / "halves")
    assert record.resumed_at == [3]
    assert whole.model_file.read_bytes() == halves.model_file.read_bytes()


def test_the_progress_line_shows_the_cost_of_the_adversary(tmp_path):
    class Names(Remembers):
        def on_start(self, name, done, total):
            self.name = name

    train(tiny(steps=1, adversary="pgd(steps=2)"), tmp_path, callback=(callback := Names()))
    assert callback.name.endswith("-seed0, 3x the passes")
    costs = {name: as_adversary(name).cost for name in adversaries}
    assert costs == {"fgsm": 3.0, "n-fgsm": 2.0, "pgd": 8.0, "trades": 12.0}
    assert as_adversary("fgsm(share=1)").cost == 2.0


def test_margins_require_an_adversary_without_its_own_loss(tmp_path):
    for adversary in ("fgsm", "pgd(steps=1)"):
        _, record = train(tiny(steps=1, margin="a-softmax", adversary=adversary), tmp_path)
        assert record.status == "done"
    for adversary in ("trades", "fgsm(share=0.3)"):
        with pytest.raises(ValueError, match="does not support margin"):
            tiny(margin="a-softmax", adversary=adversary)


def test_specs_round_trip():
    for spec in (
        "fgsm",
        "fgsm(epsilon=6/255)",
        "fgsm(epsilon=0.0235)",
        "pgd(steps=3)",
        "n-fgsm(noise=1.0)",
        "trades(beta=2.0,steps=4)",
        "fgsm(epsilon=0.1,share=1.0,predicted=True)",
    ):
        assert str(as_adversary(spec)) == spec
    assert as_adversary("pgd(epsilon=4/255)") == PGD(epsilon=4 / 255)
    assert str(PGD(epsilon=6 / 255, step=1.5 / 255)) == "pgd(epsilon=6/255,step=1.5/255)"
    assert tiny(adversary="fgsm(epsilon=8/255)").hash == tiny(adversary="fgsm").hash != tiny().hash


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("fgms", "unknown adversary 'fgms': known are fgsm, n-fgsm, pgd, trades; did you mean 'fgsm'?"),
        ("fgsm(epsilon=8)", "epsilon of fgsm, for pixels in [0, 1], must be in (0, 1], not 8"),
        ("fgsm(epsilon=0)", "epsilon of fgsm"),
        ("fgsm(epsilon=8/0)", "invalid adversary"),
        ("fgsm(share=0)", "share of fgsm must be in (0, 1], not 0"),
        ("fgsm(share=2)", "share of fgsm must be in (0, 1], not 2"),
        ("fgsm(share='a')", "share of fgsm must be a number, not 'a'"),
        ("fgsm(share=True)", "share of fgsm must be a number, not True"),
        ("fgsm(predicted=3)", "predicted of fgsm must be True or False, not 3"),
        ("fgsm(predicted='yes')", "predicted of fgsm must be True or False, not 'yes'"),
        ("pgd(steps=0)", "steps of pgd must be a whole number, 1 or more, not 0"),
        ("n-fgsm(noise=-1)", "noise of n-fgsm must not be negative, not -1"),
        ("pgd(step=-1)", "step of pgd"),
        ("trades(beta=0)", "beta of trades"),
        ("pgd(restarts=3)", "pgd has no 'restarts', only epsilon, steps, step"),
    ],
)
def test_invalid_specs_raise_one_sentence(spec, problem):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the words follow
        tiny(adversary=spec)
    assert problem in str(error.value)


def test_objective_without_an_adversary_is_the_plain_loss():
    network, (images, labels) = network_that_tracks(), batch()
    objective = Objective(tiny(operator="tanh-cos"), network)
    twin = copy.deepcopy(network)
    loss, _ = objective.loss(network, images.float(), labels)
    assert torch.equal(loss, F.cross_entropy(twin(images.float()), labels))


def test_objective_trains_on_adversarial_images():
    images, labels = batch()
    losses = {}
    for adversary in (None, "fgsm(epsilon=0.1,share=1)"):
        network = network_that_tracks()
        losses[adversary], _ = Objective(tiny(adversary=adversary), network).loss(network, images.float(), labels)
    assert losses["fgsm(epsilon=0.1,share=1)"] > losses[None] + 0.01
