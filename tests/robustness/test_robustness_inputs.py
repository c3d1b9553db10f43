"""What cannot be attacked is refused in one sentence, with the value and what would be right."""

import dataclasses
import inspect

import pytest
import torch
from attacked_networks import CLASSES, SHAPE, attacked, images, smooth, with_everything
from torch import nn

from dcnet.robustness import accuracy, attacks, correct
from dcnet.robustness.attack import Attack, as_attack, register, registry


def refused(match, error=ValueError):
    return pytest.raises(error, match=match)


@pytest.mark.parametrize("epsilon", [-0.1, 8, 1.001, float("nan"), float("inf"), "8", None, True])
def test_an_epsilon_beyond_the_range_of_pixels(epsilon):
    model, x, y = attacked(2)
    with refused(r"epsilon must be a number from 0 to 1, since pixels .*: write 8 / 255"):
        attacks.pgd(model, x, y, epsilon=epsilon)
    with refused("epsilon must be a number from 0 to 1"):
        attacks.curve(model, x, y, epsilons=[0.1, epsilon])


def test_the_longest_way_of_l2_is_a_budget():
    model, x, y = attacked(2)
    attacks.fgsm(model, x, y, epsilon=75**0.5, norm="l2")
    with refused("from 0 to 8.66, .*not 9"):
        attacks.fgsm(model, x, y, epsilon=9, norm="l2")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda x: x * 2 - 1, r"float from 0 to 1, not torch.float64 from -\d.*normalisation belongs into the model"),
        (lambda x: x * 255, "float from 0 to 1, not torch.float64 from"),
        (lambda x: x / 0, "from inf|to inf"),
        (lambda x: x[:0], r"there are no images: expected \[N, ...\] with one image or more, not \[0, 3, 5, 5\]"),
        (lambda x: x[0, 0, 0], r"images must be \[N, ...\], not \[5\]"),
    ],
)
def test_images_that_are_none(change, says):
    model, x, y = attacked(4)
    for call in (lambda bad: attacks.fgsm(model, bad, y, epsilon=0.1), lambda bad: accuracy(model, bad, y)):
        with refused(says):
            call(change(x))


def test_lists_and_arrays_are_no_tensors():
    model, x, y = attacked(4)
    for call in (lambda *bad: attacks.fgsm(model, *bad, epsilon=0.1), lambda *bad: accuracy(model, *bad)):
        with refused(r"images must be a tensor, not a ndarray: give torch.as_tensor\(images\)", TypeError):
            call(x.numpy(), y)
        with refused("labels must be a tensor, not a list", TypeError):
            call(x, y.tolist())
    with refused("targets must be a tensor, not a list", TypeError):
        attacks.pgd(model, x, y, epsilon=0.1, targets=y.tolist())


def test_a_pixel_that_is_nan_is_found():
    model, x, y = attacked(4)
    x[2, 0, 1, 1] = x[3] = float("nan")
    with refused("image 2 has a pixel that is NaN, and so have 2 of 4 in all"):
        attacks.pgd(model, x, y, epsilon=0.1)


def test_images_that_resizing_left_a_little_outside_are_brought_back():
    model, x, y = attacked(4)
    found = attacks.pgd(model, x * 1.0004, y, epsilon=0.1)
    assert found.max() <= 1


def test_bytes_count_as_pixels():
    model, y = with_everything(), torch.zeros(4, dtype=torch.int64)
    x = torch.randint(256, (4, *SHAPE), dtype=torch.uint8)
    expected = attacks.fgsm(model, x.float() / 255, y, epsilon=0.1)
    assert torch.equal(attacks.fgsm(model, x, y, epsilon=0.1), expected)


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ([0, 1, 2, CLASSES], "labels must be from 0 to 4, since the network has 5 classes, not 5"),
        ([0, -1, 2, 3], "labels must be from 0 to 4, .*not -1"),
        ([0, 1, 2], r"labels must be integers \[4\], one an image, not torch.int64 \[3\]"),
        ([0.0, 1.0, 2.0, 3.0], r"labels must be integers \[4\], one an image, not torch.float32 \[4\]"),
    ],
)
def test_labels_that_are_none(labels, says):
    model, x, _ = attacked(4)
    for call in (
        lambda: attacks.fgsm(model, x, torch.tensor(labels), epsilon=0.1),
        lambda: attacks.curve(model, x, torch.tensor(labels), epsilons=[0.1]),
        lambda: correct(model, x, torch.tensor(labels)),
    ):
        with refused(says):
            call()


def test_targets_that_are_none():
    model, x, y = attacked(4)
    with refused("targets must be from 0 to 4"):
        attacks.pgd(model, x, y, epsilon=0.1, targets=y + 5)
    aims = (y + 1) % CLASSES
    aims[2] = y[2]
    with refused(f"the target of image 2 must be another class than its label, {int(y[2])}"):
        attacks.pgd(model, x, y, epsilon=0.1, targets=aims)
    with refused("autoattack does not take targets: use pgd"):
        attacks.autoattack(model, x, y, epsilon=0.1, targets=(y + 1) % CLASSES)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"norm": "l3"}, "unknown norm 'l3': known are linf, l2"),
        ({"loss": "mse"}, "unknown loss 'mse': known are ce, margin"),
        ({"steps": 0}, "steps must be a whole number of at least 1, not 0"),
        ({"restarts": 1.5}, "restarts must be a whole number of at least 1, not 1.5"),
        ({"restarts": 2, "random_start": False}, "2 restarts without random_start are the same one"),
        ({"step": 0.0}, "step must be positive, not 0.0"),
        ({"momentum": -1.0}, "momentum must not be negative, not -1.0"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, not 0"),
        ({"batch_size": 2.5}, "batch_size must be a whole number of at least 1, not 2.5"),
        ({"batch_size": True}, "batch_size must be a whole number of at least 1, not True"),
        ({"batch_size": "2"}, "batch_size must be a whole number of at least 1, not '2'"),
        ({"stepps": 3}, "pgd has no 'stepps' to choose: it has norm, loss, steps, step, restarts"),
        ({"attack": "pdg"}, "unknown attack 'pdg': known are .*did you mean 'pgd'"),
        ({"attack": "fgsm", "steps": 3}, "fgsm has no 'steps' to choose: it has norm, loss"),
        ({"attack": "square", "queries": 0}, "queries must be a whole number of at least 1, not 0"),
        ({"attack": "autoattack", "parts": ("apgd",)}, "unknown part of autoattack 'apgd': known are apgd-ce"),
    ],
)
def test_settings_that_are_none(options, says):
    model, x, y = attacked(2)
    with refused(says):
        attacks.perturb(model, x, y, **{"attack": "pgd", "epsilon": 0.1, **options})


def test_networks_that_are_none():
    model, x, y = attacked(2)
    with refused("the model must be an nn.Module, not function"):
        attacks.fgsm(lambda images: images, x, y, epsilon=0.1)
    with refused(r"Identity must give logits \[N, classes\], and gives \[1, 3, 5, 5\]"):
        attacks.fgsm(nn.Identity(), x, y, epsilon=0.1)
    with refused("the source must know the 5 classes that the network has, and knows 3"):
        attacks.fgsm(model, x, y, epsilon=0.1, source=smooth(3))
    with refused("epsilons must be one number or more, and there is none"):
        attacks.curve(model, x, y, epsilons=[])


class Answers(nn.Module):
    """Scores that do not tell by a gradient where they come from."""

    def forward(self, input):
        return torch.stack([input.detach().mean((1, 2, 3)), torch.full((len(input),), 0.5)], 1)


def test_a_network_without_a_gradient():
    x = images(3)
    y = Answers()(x).argmax(1)
    with refused("no gradient with respect to the images: use an attack that needs none, such as square"):
        attacks.pgd(Answers(), x, y, epsilon=0.1)
    found = attacks.square(Answers(), x, y, epsilon=1.0, queries=200)
    assert accuracy(Answers(), found, y) < 1


def test_one_more_attack_is_one_class():
    @register
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Black(Attack):
        """Everything as dark as it may be."""

        name = "black"
        about = "darkness"
        times: int = 1

        def images(self, task):
            return (task.x - task.epsilon * self.times).clamp(0, 1)

    try:
        model, x, y = attacked(3)
        assert torch.equal(attacks.black(model, x, y, epsilon=1), torch.zeros_like(x))
        assert len(attacks.curve(model, x, y, attack="black", epsilons=[0, 1])) == 2
        assert attacks.black.__doc__.startswith("Everything as dark")
        assert "black" in dir(attacks)
        assert str(as_attack("black", times=2)) == "black(times=2)"
        with refused("'black' is taken: Black is an attack of that name"):
            register(Black)
    finally:
        del registry["black"]
    with refused("has no 'black': its attacks are", AttributeError):
        _ = attacks.black


def test_an_attack_says_what_was_chosen():
    chosen = as_attack("pgd", steps=50, norm="l2")
    assert str(chosen) == "pgd(norm=l2,steps=50)"
    assert str(as_attack("fgsm")) == "fgsm"
    assert as_attack(chosen, steps=10) == as_attack("pgd", steps=10, norm="l2")
    assert as_attack("pgd", **chosen.settings()) == chosen
    assert as_attack("fgsm").settings() == {"norm": "linf", "loss": "ce"}


@pytest.mark.parametrize("name", attacks.registry)
def test_the_signature_of_an_attack_has_its_settings_and_their_defaults(name):
    kind, function = attacks.registry[name], getattr(attacks, name)
    parameters = inspect.signature(function).parameters
    settings = {declared.name: declared.default for declared in dataclasses.fields(kind) if declared.init}
    assert {key: parameters[key].default for key in settings} == settings
    assert list(parameters)[:4] == ["model", "x", "y", "epsilon"]
    assert ("targets" in parameters) == kind.takes_targets
    others = {"model", "x", "y", "epsilon", "targets", "source", "seed", "batch_size", "compile"}
    assert set(parameters) - set(settings) <= others
    for key in parameters:
        assert f"    {key}: " in function.__doc__


def test_the_signature_of_pgd_can_be_called_as_it_is_shown():
    parameters = inspect.signature(attacks.pgd).parameters.values()
    shown = {one.name: one.default for one in parameters if one.default is not one.empty}
    assert {"steps": 40, "step": None, "restarts": 1, "norm": "linf"}.items() <= shown.items()
    model, x, y = nn.Flatten(), torch.rand(2, 1, 2, 2), torch.tensor([0, 1])
    found = attacks.pgd(model, x, y, epsilon=0.1, **shown)
    assert torch.equal(found, attacks.pgd(model, x, y, epsilon=0.1))
