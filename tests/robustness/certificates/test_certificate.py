"""Certificates of networks: upper bounds that no attack exceeds, exact for linear networks."""

import functools
import math

import pytest
import torch
from torch import nn

import dcnet
from dcnet.gradient_attack import norms
from dcnet.losses import MarginSoftmax
from dcnet.models.blocks import MarginNetwork, Network, Normalized
from dcnet.robustness import attacks
from dcnet.robustness.certificates import certificate
from dcnet.robustness.certificates.certificate import Certificate, certify, lipschitz, output_bounds

CLASSES = 4
EPSILONS = {"linf": 0.1, "l2": 0.7}


def seen(model, side):
    """The model in float64 with the running statistics of a batch."""
    model = Normalized(model, [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]).double().train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        for seed in range(3):
            model(torch.rand(8, 3, side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))
    return model.eval()


def network(name, operator, **options):
    torch.manual_seed(0)
    return seen(dcnet.create_model(name, operator=operator, num_classes=CLASSES, image_size=8, **options), 8)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = dcnet.DecoupledConv2d(3, 3, 3, padding=1, operator="tanh-cos")
        self.pool = nn.AvgPool2d(2)
        self.last = nn.Linear(48, CLASSES)

    def forward(self, x):
        x = torch.relu(self.inner(x) + x)
        return self.last(torch.flatten(self.pool(x), 1))


def small(operator="tanh(radius=4.0)-cos"):
    torch.manual_seed(0)
    layers = [dcnet.DecoupledConv2d(3, 6, 3, operator=operator), nn.PReLU(6), nn.MaxPool2d(2), nn.Flatten()]
    return seen(nn.Sequential(*layers, dcnet.DecoupledLinear(54, 8, operator=operator), nn.Linear(8, CLASSES)), 8)


def with_head(scale, margin="am-softmax"):
    torch.manual_seed(0)
    body = dcnet.create_model("cnn9-small", operator="tanh-cos", num_classes=0, width=0.125, image_size=8)
    return seen(MarginNetwork(body, MarginSoftmax(8, CLASSES, margin, scale=scale), features=8), 8)


BUILDERS = {
    "cnn9-small tanh-cos": lambda: network("cnn9-small", "tanh-cos", width=0.125),
    "cnn9-small sphere-cos": lambda: network("cnn9-small", "sphere-cos", width=0.125),
    "cnn9-small plain": lambda: network("cnn9-small", "conv", width=0.125),
    "cnn9 without norm": lambda: network("cnn9", "ball-relucos", width=0.1, norm="none", activation="prelu"),
    "normalised classifier": lambda: network("cnn9-small", "seg-sqcos", width=0.125, classifier="normalized"),
    "resnet32 tanh-cos": lambda: network("resnet32", "tanh-cos", width=0.03),
    "resnet32 plain": lambda: network("resnet32", "conv", width=0.03),
    "sequential": small,
    "residual": lambda: seen(Residual(), 8),
    "head of a fixed scale": lambda: with_head(8.0),
    "head of the norm": lambda: with_head("norm"),
}


@functools.cache
def built(name):
    """The network of that name; tests must not change it."""
    return BUILDERS[name]()


def images(count=12):
    return torch.rand(count, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(9))


@torch.no_grad()
def largest_share(model, certificate, x, others):
    """The largest movement found, relative to the bound, over all pairs of logits."""
    moved = model(others) - model(x)
    found = (moved[:, :, None] - moved[:, None, :]).abs().amax(0)
    return float((found / certificate.movement).nan_to_num(0).max())


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("name", BUILDERS)
def test_no_perturbation_moves_logits_beyond_the_bound(name, norm):
    model, x, epsilon = built(name), images(), EPSILONS[norm]
    y = model(x).argmax(1)
    for size in (epsilon, epsilon / 100):
        certificate = certify(model, size, norm, image_size=8)
        attacked = attacks.pgd(model, x, y, epsilon=size, norm=norm, steps=5, loss="margin")
        steps = norms[norm].sample_ball(x, torch.arange(len(x)), 3)
        corners = norms[norm].steepest(torch.randn_like(x))
        for others in (attacked, x + size * steps, x + size * corners):
            assert largest_share(model, certificate, x, others) <= 1


@pytest.mark.parametrize(
    "name", ["cnn9-small tanh-cos", "cnn9-small sphere-cos", "head of a fixed scale", "resnet32 tanh-cos"]
)
def test_logits_of_bounded_operators_stay_within_their_bounds(name):
    model = built(name)
    certificate = certify(model, 1, "linf", image_size=8)
    assert certificate.bounded
    assert certificate.bound <= float(certificate.spread.max())
    with torch.no_grad():
        for size in (1, 1e3, 1e9):
            logits = model(torch.randn(40, 3, 8, 8, dtype=torch.float64) * size)
            assert (logits >= certificate.low).all()
            assert (logits <= certificate.high).all()
            apart = logits[:, :, None] - logits[:, None, :]
            assert (apart.amax(0) - apart.amin(0) <= certificate.spread + 1e-9).all()
    # The bounds are not far too wide.
    reached = (logits.amax(0) - logits.amin(0)) / (certificate.high - certificate.low)
    assert reached.max() > 0.002


def test_logits_of_a_plain_network_are_unbounded():
    certificate = certify(built("cnn9-small plain"), 0.1, image_size=8)
    assert not certificate.bounded
    assert certificate.summary()["spread"] is None
    assert "the logits are unbounded" in str(certificate)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_certificate_of_a_linear_network_is_exact(norm):
    torch.manual_seed(0)
    layer = nn.Linear(12, 3).double()
    layer.bias.data.copy_(-0.5 * layer.weight.data.sum(1))
    model, x = nn.Sequential(nn.Flatten(), layer), torch.full((40, 3, 2, 2), 0.5, dtype=torch.float64)
    x = x + 0.3 * (torch.rand_like(x) - 0.5)
    y, w, epsilon = model(x).argmax(1), layer.weight.detach(), 0.02 if norm == "linf" else 0.05
    certificate = certify(model, epsilon, norm, x=x, y=y)
    length = (w[:, None] - w[None, :]).norm(p=1 if norm == "linf" else 2, dim=2)
    assert torch.allclose(certificate.movement, epsilon * length)
    broken = torch.zeros(len(x), dtype=torch.bool)
    for target in range(3):
        ways = norms[norm].steepest(w[target] - w[y]).view_as(x)
        broken |= model(x + epsilon * ways).argmax(1) != y
    assert 0 < broken.sum() < len(x)
    assert certificate.certified == pytest.approx(1 - float(broken.double().mean()))
    assert not certificate.vacuous


def test_attacks_do_not_break_certified_images():
    model, x = small(), images(40)
    y = model(x).argmax(1)
    epsilon = 0.13
    certificate = certify(model, epsilon, "l2", x=x, y=y)
    assert 0.1 < certificate.certified < 1
    assert certificate.accuracy == 1
    assert certificate.factor < 1
    assert certificate.reach > epsilon
    assert certify(model, certificate.reach * 0.999, "l2", x=x, y=y).certified > 0
    assert certify(model, certificate.reach * 1.001, "l2", x=x, y=y).certified == 0
    assert f"{certificate.certified:.1%} of 40 images are certified" in str(certificate)
    kept = attacks.accuracy(model, attacks.pgd(model, x, y, epsilon=epsilon, norm="l2", restarts=2), y)
    assert kept >= certificate.certified


def test_vacuous_certificates_report_the_missing_factor():
    model, x = built("cnn9-small sphere-cos"), images(4)
    y = model(x).argmax(1)
    given, alone = certify(model, 0.1, x=x, y=y), certify(model, 0.1, image_size=8)
    assert given.vacuous
    assert given.certified == 0
    assert given.factor > 1
    assert f"vacuous, since that is {given.factor:.3g} times the largest margin of 4 images" in str(given)
    assert f"the Lipschitz constant certifies up to epsilon {given.reach:.3g}" in str(given)
    assert given.reach < 1e-20
    assert alone.vacuous
    assert alone.excess > 1e6
    assert "For any image all logits are between" in str(alone)
    wrong = certify(model, 0.1, x=x, y=(y + 1) % CLASSES)
    assert wrong.factor is None
    assert "classifies none of 4 images correctly" in str(wrong)


def overflowing(operator):
    """A network so deep that the product of the constants of its layers overflows."""
    torch.manual_seed(0)
    layers = [dcnet.DecoupledConv2d(3, 3, 1, operator=operator, eps=1e-30) for _ in range(30)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(3, CLASSES)).double().eval()


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("operator", ["sphere-cos", "sphere&linear-cos"])
def test_overflowing_lipschitz_constants_give_no_bound_and_no_nan(operator, norm):
    model, x = overflowing(operator), images(6)[:, :, :1, :1]
    y = model(x).argmax(1)
    y[0] = (y[0] + 1) % CLASSES
    certificate = certify(model, 0.1, norm, x=x, y=y)
    assert lipschitz(model, [3, 1, 1], norm) == math.inf
    assert certificate.bound == certificate.spread.max()
    assert certificate.accuracy == pytest.approx(5 / 6)
    assert certificate.certified == 0
    assert certificate.vacuous
    assert certificate.reach == 0
    assert "nan" not in str(certificate)
    assert certify(model, 0, norm, x=x, y=y).certified == pytest.approx(5 / 6)
    assert "nan" not in str(certify(model, 0.1, norm, image_size=1))


def test_epsilon_zero_certifies_all_correct_images():
    model, x = small(), images(6)
    y = model(x).argmax(1)
    y[0] = (y[0] + 1) % CLASSES
    assert certify(model, 0, x=x, y=y).certified == pytest.approx(5 / 6)


def test_scales_of_normalization_count_with_their_filters():
    """A tiny filter that normalization scales up does not enlarge the bound of others."""
    layer, norm = nn.Conv2d(3, 2, 1, bias=False), nn.BatchNorm2d(2, eps=0)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 0, 0], [0, 1e-6, 0]])[:, :, None, None])
        norm.running_var.copy_(torch.tensor([1.0, 1e-12]))
    certificate = certify(nn.Sequential(layer, norm, nn.Flatten()).eval(), 1, "l2", image_size=1)
    assert certificate.bound == pytest.approx(math.sqrt(2), rel=1e-6)


def test_certify_leaves_the_model_unchanged():
    model, x = small(), images(4)
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    certify(model, 0.1, x=x, y=torch.zeros(4, dtype=torch.int64))
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


class Untraced(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x):
        return self.inner(x) if x.sum() > 0 else -self.inner(x)


class Squared(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x):
        return self.inner(x) * self.inner(x)


def hooked():
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    model[1].register_forward_hook(lambda module, given, output: output * 2)
    return model


def poisoned():
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    model[1].weight.data[0, 0] = math.nan
    return model


def own_function(n):
    return n.sqrt()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)), "layer '1', a GroupNorm, has no rule"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Sequential(Untraced())), "layer '1.0', a Untraced, .*cannot be traced"),
        (Squared, "the Squared takes 3 features|layer 'inner', a Linear, takes 3 features"),
        (lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), Squared()), "calls 'mul' in its forward"),
        (hooked, "layer '1', a Linear, has hooks"),
        (poisoned, "'1.weight' of the network is not finite"),
        (
            lambda: nn.Sequential(dcnet.DecoupledConv2d(3, 2, 8, operator=dcnet.Operator(own_function, "cos"))),
            "layer '0', a DecoupledConv2d, has the magnitude '<own_function>', whose slope has no known bound",
        ),
        (
            lambda: nn.Sequential(dcnet.DecoupledConv2d(3, 2, 8, operator=dcnet.Operator("tanh", torch.sin))),
            "has the angle '<sin>', whose slope has no known bound",
        ),
        (
            lambda: nn.Conv2d(1, 2, 3),
            "the Conv2d takes 1 channels, but gets .3, 8, 8. per image: give the image_size",
        ),
        (lambda: nn.Conv2d(3, 2, 9), "a kernel that does not fit into .3, 8, 8.: give a larger image_size"),
        (lambda: nn.Conv2d(3, 2, 3), r"Conv2d must return two logits or more, not \[2, 6, 6\]"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 1)), r"must return two logits or more, not \[1\]"),
        (lambda: nn.BatchNorm2d(3, track_running_stats=False), "normalizes by the statistics of the batch"),
        (lambda: dcnet.create_model("cnn9-small", image_size=32, width=0.1), "expects images of image_size=32"),
        (lambda: "cnn9", "the model must be an nn.Module, not str"),
    ],
)
def test_certify_names_the_layer_without_a_rule(model, message):
    with pytest.raises(ValueError, match=message) as error:
        certify(model(), 0.1, image_size=8)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": 8, "image_size": 8}, "epsilon must be a number from 0 to 1"),
        ({"epsilon": 14, "norm": "l2", "image_size": 8}, "epsilon must be a number from 0 to 13.86"),
        ({"epsilon": 0.1, "norm": "l1", "image_size": 8}, "unknown norm 'l1'"),
        ({"epsilon": 0.1}, "image_size is missing"),
        ({"epsilon": 0.1, "image_size": 0}, r"whole numbers above 0, such as \(3, 32, 32\), not \(3, 0, 0\)"),
        ({"epsilon": 0.1, "image_size": 8.0}, r"whole numbers above 0, .* not \(3, 8.0, 8.0\)"),
        (
            {"epsilon": 0.1, "image_size": 9, "x": images(2), "y": torch.zeros(2).long()},
            "not of image_size=9: omit it",
        ),
        ({"epsilon": 0.1, "x": images(2)}, "x and y go together"),
        ({"epsilon": 0.1, "x": images(2) * 9, "y": torch.zeros(2).long()}, "uint8, or float in"),
        ({"epsilon": 0.1, "x": images(2), "y": torch.full((2,), 7)}, "labels must be from 0 to 3"),
    ],
)
def test_certify_rejects_invalid_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        certify(small(), **options)


def test_certify_rejects_custom_norms():
    """Their unit ball may be larger than that of linf."""
    norms.add("wide", norms["linf"])
    try:
        with pytest.raises(ValueError, match="unknown norm 'wide': known are linf, l2"):
            certify(small(), 0.1, "wide", image_size=8)
    finally:
        del norms["wide"]


def test_networks_with_a_custom_forward_are_traced():
    class Mine(Network):
        def forward(self, input):
            return 2 * self.classifier(self.features(input))

    torch.manual_seed(0)
    own = dcnet.create_model("cnn9-small", operator="conv", width=0.1, image_size=8, num_classes=2)
    own.__class__ = Mine
    with pytest.raises(ValueError, match="the Mine calls 'mul' in its forward, for which there is no rule"):
        certify(own, 0.1, image_size=8)


def test_heads_with_several_centers_a_class_have_no_certificate():
    with pytest.raises(ValueError, match="has 3 centers per class, for which there is no rule"):
        certify(with_head(8.0, "subcenter-arcface"), 0.1, image_size=8)


def negative_norm():
    norm = nn.BatchNorm2d(2)
    nn.init.constant_(norm.weight, -2.0)
    return norm


FOLLOWING = {
    "means that count padding": lambda: nn.AvgPool2d(3, stride=1, padding=1),
    "means that do not": lambda: nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False),
    "the largest with padding": lambda: nn.MaxPool2d(3, stride=2, padding=1),
    "a slope that turns": lambda: nn.PReLU(2, init=-0.5),
    "one that turns all the way": lambda: nn.LeakyReLU(-1.0),
    "a small slope": lambda: nn.LeakyReLU(0.1),
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "a negative scale": negative_norm,
}


@pytest.mark.parametrize("bias", [-3.0, 0.0, 3.0])
@pytest.mark.parametrize("name", FOLLOWING)
def test_output_bounds_hold_after_the_next_module(name, bias):
    torch.manual_seed(0)
    layer = dcnet.DecoupledConv2d(2, 2, 1, operator="tanh-cos")
    nn.init.constant_(layer.bias, bias)
    model = nn.Sequential(layer, FOLLOWING[name]()).double().eval()
    low, high = output_bounds(model, [2, 4, 4])
    sizes = torch.logspace(-6, 3, 60, dtype=torch.float64)[:, None, None, None]
    found = model(sizes * torch.randn(60, 2, 4, 4, dtype=torch.float64)).detach().transpose(0, 1).flatten(1)
    assert (low <= found.amin(1)).all()
    assert (found.amax(1) <= high).all()
    assert high.max() - low.min() <= 13


def test_images_that_reach_a_tie_are_not_certified():
    """With equal logits either class may be predicted."""
    ones = torch.ones(2, 2, dtype=torch.float64)
    bounds = Certificate(0.5, "linf", ones, 4 * ones, -ones[0], ones[0])
    model = nn.Flatten()
    for lead, share in ((0.5, 0.0), (0.5 + 1e-9, 1.0)):
        x = torch.tensor([lead, 0.0], dtype=torch.float64).view(1, 2, 1, 1)
        assert certificate._with_images(model, bounds, x, torch.tensor([0]), 1).certified == share
