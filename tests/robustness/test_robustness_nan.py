"""Networks that answer NaN: such an image is broken for whoever leads away from its label, and at nobody's target."""

import pytest
import torch
from attacked_networks import CLASSES, attacked, images
from torch import Tensor, nn

from dcnet.robustness import accuracy, attacks, correct
from dcnet.robustness.goal import LOSSES, Goal
from dcnet.robustness.probes import gradients
from dcnet.robustness.subject import Subject


class Breaks(nn.Module):
    """A network that has no answer to images that have left their place far enough, or to none of them."""

    def __init__(self, network: nn.Module, x: Tensor, limit: float):
        super().__init__()
        self.network, self.limit = network, limit
        self.register_buffer("x", x)

    def forward(self, input: Tensor) -> Tensor:
        far = (input[:, None] - self.x[None]).flatten(2).abs().amax(2).amin(1) > self.limit
        # At the label itself, which argmax would name, and nowhere else.
        logits = self.network(input)
        first = torch.arange(logits.shape[1]) == logits.argmax(1, keepdim=True)
        return torch.where(first & far[:, None], torch.nan, logits)


@pytest.mark.parametrize(
    ("name", "settings"), [("bim", {}), ("pgd", {}), ("pgd", {"early_stop": False, "restarts": 2})]
)
def test_attacks_keep_what_the_network_has_no_answer_to(name, settings):
    network, x, y = attacked(6)
    model = Breaks(network, x, 0.0004)
    assert correct(model, x, y).all()
    # Far too little for another class.
    assert accuracy(network, attacks.pgd(network, x, y, epsilon=0.0005), y) == 1
    found = getattr(attacks, name)(model, x, y, epsilon=0.0005, **settings)
    assert not correct(model, found, y).any()


@pytest.mark.parametrize("loss", ["ce", "margin"])
def test_nan_is_broken_away_from_a_label_and_at_no_target(loss):
    network, x, y = attacked(4)
    model = Breaks(network, x, -1.0)
    for targeted in (False, True):
        score, there = Goal(model, LOSSES[loss], targeted).judged(x, y)
        assert there.tolist() == [not targeted] * 4
        assert score.isnan().any()
    # What is finite is judged as before.
    assert Goal(network, LOSSES[loss], True).judged(x, y)[1].all()
    assert not Goal(network, LOSSES[loss]).judged(x, y)[1].any()


def test_a_targeted_attack_finds_the_target_and_not_a_nan():
    network, x, y = attacked(6)
    targets = (y + 1) % CLASSES
    model = Breaks(network, x, 2.0)
    found = attacks.pgd(model, x, y, epsilon=1.0, targets=targets)
    assert torch.equal(model(found).argmax(1), targets)
    broken = Breaks(network, x, -1.0)
    assert not Goal(broken, LOSSES["ce"], True).judged(found, targets)[1].any()


def test_gradients_count_the_images_that_are_right():
    network, x, y = attacked(6)
    model = Breaks(network, torch.cat([x[:4], images(1, seed=8)]), 1e-9)
    assert gradients(Subject(model, x, y))["images"] == 4 == int(correct(model, x, y).sum())
