"""Corruptions: values against plain loops, and accuracies under them."""

import math

import pytest
import torch
from helpers.attacked_networks import CLASSES, PIXELS, SHAPE, answers, attacked, images, with_everything
from helpers.attacks_in_loops import draw
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dcnet.robustness import accuracy, corruptions
from dcnet.robustness.corruptions import SEVERITIES, corrupt, registry

LEVELS = {
    "noise": (0.04, 0.06, 0.08, 0.09, 0.10),
    "blur": (0.4, 0.6, 0.7, 0.8, 1.0),
    "brightness": (0.05, 0.1, 0.15, 0.2, 0.3),
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),
    "shade": (0.8, 0.6, 0.4, 0.2, 0.05),
}


def inverse_normal(share):
    """By bisection of the error function."""
    low, high = -10.0, 10.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if 0.5 * (1 + math.erf(middle / math.sqrt(2))) < share else (low, middle)
    return low


def noise(x, deviation, row):
    count = len(x) * len(x[0]) * len(x[0][0])
    found, place = [], 0
    for channel in x:
        rows = []
        for line in channel:
            rows.append([v + deviation * inverse_normal(draw(5, row, place + at, count)) for at, v in enumerate(line)])
            place += len(line)
        found.append(rows)
    return found


def blur(x, deviation, row):
    reach = math.ceil(3 * deviation)
    weights = {
        (i, j): math.exp(-(i * i + j * j) / (2 * deviation**2))
        for i in range(-reach, reach + 1)
        for j in range(-reach, reach + 1)
    }
    total = sum(weights.values())
    height, width = len(x[0]), len(x[0][0])

    def mean(channel, down, right):
        inside = lambda at, size: min(max(at, 0), size - 1)  # noqa: E731
        near = ((w, channel[inside(down + i, height)][inside(right + j, width)]) for (i, j), w in weights.items())
        return sum(w * value for w, value in near) / total

    return [[[mean(channel, down, right) for right in range(width)] for down in range(height)] for channel in x]


def brightness(x, added, row):
    return [[[value + added for value in line] for line in channel] for channel in x]


def contrast(x, kept, row):
    found = []
    for channel in x:
        values = [value for line in channel for value in line]
        mean = sum(values) / len(values)
        found.append([[mean + kept * (value - mean) for value in line] for line in channel])
    return found


def shade(x, least, row):
    """The light falls linearly along a direction, from 1 at the first corner that it reaches to `least` at the last."""
    angle = 2 * math.pi * draw(5, row, 0, 1)
    height, width = len(x[0]), len(x[0][0])
    corners = [down * math.sin(angle) + right * math.cos(angle) for down in (-1, 1) for right in (-1, 1)]

    def factor(down, right):
        along = (2 * down / (height - 1) - 1) * math.sin(angle) + (2 * right / (width - 1) - 1) * math.cos(angle)
        return 1 + (least - 1) * (along - min(corners)) / (max(corners) - min(corners))

    return [[[v * factor(i, j) for j, v in enumerate(line)] for i, line in enumerate(channel)] for channel in x]


LOOPS = {"noise": noise, "blur": blur, "brightness": brightness, "contrast": contrast, "shade": shade}


@pytest.mark.parametrize("kind", sorted(registry))
@pytest.mark.parametrize("severity", SEVERITIES)
def test_values_match_plain_loops(kind, severity, device):
    x = images(3)
    found = corrupt(x.to(device), kind, severity, seed=5)
    assert found.device.type == device
    for row in range(3):
        loop = LOOPS[kind](x[row].tolist(), LEVELS[kind][severity - 1], row)
        expected = torch.tensor(loop, dtype=torch.float64).clamp(0, 1)
        # Noise and the direction of the shade are drawn in float32.
        atol = 1e-6 if kind in ("noise", "shade") else 1e-12
        torch.testing.assert_close(found[row].cpu(), expected, rtol=0, atol=atol)


def test_blur_grows_with_the_size_of_the_image():
    x = torch.zeros(1, 1, 65, 97, dtype=torch.float64)
    x[0, 0, 32, 48] = 1
    spread = corrupt(x, "blur", 5)[0, 0, 32]
    places = torch.arange(97) - 48
    deviation = (spread @ (places**2).double() / spread.sum()).sqrt()
    assert deviation == pytest.approx(65 / 32, rel=0.02)


@settings(max_examples=60)
@given(st.sampled_from(sorted(registry)), st.sampled_from(SEVERITIES), st.integers(0, 2**63 - 1), st.integers(1, 5))
def test_corrupted_images_keep_shape_dtype_and_range(kind, severity, seed, side):
    x = (3 * torch.rand(2, 1, side, side + 1) - 1).clamp(0, 1)
    found = corrupt(x, kind, severity, seed=seed)
    assert (found.shape, found.dtype) == (x.shape, x.dtype)
    assert found.min() >= 0
    assert found.max() <= 1
    assert torch.equal(corrupt(x, kind, severity, seed=seed), found)


@pytest.mark.parametrize("kind", sorted(registry))
def test_higher_severities_change_images_more(kind):
    x = images(10)
    sizes = [(corrupt(x, kind, severity) - x).abs().mean().item() for severity in SEVERITIES]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 5


def test_noise_differs_by_image_and_seed():
    x = torch.full((4, *SHAPE), 0.5)
    first, other = (corrupt(x, "noise", 1, seed=seed) for seed in (0, 1))
    assert not torch.equal(first, other)
    assert len(torch.unique(first.flatten(1), dim=0)) == 4
    assert torch.equal(corrupt(x, "noise", 1), first)
    generator = torch.Generator().manual_seed(0)
    assert not torch.equal(corrupt(x, "noise", 1, seed=generator), corrupt(x, "noise", 1, seed=generator))


@pytest.mark.parametrize("batch_size", [1, 7, 100])
def test_accuracies_match_corrupted_images(batch_size):
    model, x, y = attacked(30)
    found = corruptions.accuracies(model, x, y, seed=3, batch_size=batch_size)
    assert sorted(found) == sorted(registry)
    for kind, accuracies in found.items():
        assert accuracies == [accuracy(model, corrupt(x, kind, severity, seed=3), y) for severity in SEVERITIES]
        assert min(accuracies) < 1
    assert list(corruptions.accuracies(model, x, y, ["blur"])) == ["blur"]


def test_accuracies_leave_the_network_unchanged():
    model, x = with_everything().train(), torch.rand(4, *SHAPE)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    wanted = [parameter.requires_grad for parameter in model.parameters()]
    corruptions.accuracies(model, x, torch.zeros(4, dtype=torch.int64))
    assert all(module.training for module in model.modules())
    assert [parameter.requires_grad for parameter in model.parameters()] == wanted
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())


def test_invalid_arguments_raise_errors():
    model, x, y = attacked(4)
    with pytest.raises(ValueError, match="unknown corruption 'fog': known are noise, blur, brightness, contrast"):
        corrupt(x, "fog", 1)
    for severity in (0, 6, 1.5, 1.0, True):
        with pytest.raises(ValueError, match=f"severity must be a whole number from 1 to 5, not {severity}"):
            corrupt(x, "noise", severity)
    with pytest.raises(ValueError, match=r"images must be \[N, C, H, W\], not \[4, 75\]"):
        corrupt(x.flatten(1), "noise", 1)
    with pytest.raises(ValueError, match="images must be uint8, or float in \\[0, 1\\]"):
        corrupt(2 * x, "noise", 1)
    with pytest.raises(ValueError, match="labels must be from 0 to 4"):
        corruptions.accuracies(model, x, y + CLASSES)
    with pytest.raises(ValueError, match="'noise' is taken: Corruption is a corruption of that name"):
        corruptions.register("noise", 1, 2, 3, 4, 5)(lambda *_: x)
    with pytest.raises(ValueError, match="a corruption needs 5 levels, one per severity, not 2"):
        corruptions.register("fog", 1, 2)(lambda *_: x)


def test_uint8_images_are_scaled_to_pixels():
    x = torch.randint(256, (3, *SHAPE), dtype=torch.uint8)
    assert torch.equal(corrupt(x, "contrast", 2), corrupt(x.float() / 255, "contrast", 2))
    model = nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, 3)).eval()
    y = answers(model, x.float() / 255)
    assert corruptions.accuracies(model, x, y) == corruptions.accuracies(model, x.float() / 255, y)
