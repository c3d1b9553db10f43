"""The animation of features: a small looping GIF on fixed axes."""

import io

import pytest
import torch
from PIL import Image

from dcnet.report import feature_plots
from dcnet.report.features import Features


def moving(count, title="run", images=40, dimensions=2):
    torch.manual_seed(0)
    points, labels = torch.randn(images, dimensions), torch.arange(images) % 3
    return [
        Features(f"{title}, epoch {i + 1}", points * (i + 1), labels, ("a", "b", "c"), torch.eye(3, dimensions) + 0.1)
        for i in range(count)
    ]


def opened(content):
    image = Image.open(io.BytesIO(content))
    assert image.format == "GIF"
    return image


def pixels(image, frame):
    image.seek(frame)
    return torch.tensor(list(image.convert("RGB").tobytes()), dtype=torch.uint8).view(image.height, image.width, 3)


@pytest.mark.parametrize("dimensions", [2, 3])
def test_animation_has_a_frame_per_evaluation(dimensions):
    image = opened(feature_plots.feature_animation([moving(3, dimensions=dimensions)]))
    assert (image.n_frames, image.info["loop"]) == (3, 0)
    durations = []
    for i in range(3):
        image.seek(i)
        durations.append(image.info["duration"])
    assert durations == [feature_plots.MILLISECONDS] * 2 + [feature_plots.LAST_MILLISECONDS]


def test_axes_are_fixed_during_the_animation():
    image = opened(feature_plots.feature_animation([moving(3)]))
    # Pixels that are black in all frames are the frame around the axes: four long lines.
    black = torch.stack([(pixels(image, i) < 80).all(2) for i in range(3)]).all(0)
    assert (black.float().mean(1) > 0.7).sum() >= 2
    assert (black.float().mean(0) > 0.5).sum() >= 2


def test_shorter_run_stays_at_its_last_frame():
    image = opened(feature_plots.feature_animation([moving(3, "long"), moving(2, "short")]))
    assert image.n_frames == 3
    half = image.width // 2
    assert torch.equal(pixels(image, 1)[:, half + 20 :], pixels(image, 2)[:, half + 20 :])
    assert not torch.equal(pixels(image, 1)[:, : half - 20], pixels(image, 2)[:, : half - 20])


def test_many_evaluations_are_thinned_out():
    found = feature_plots._some(1000, feature_plots.MOST_FRAMES)
    assert len(found) == feature_plots.MOST_FRAMES
    assert found[-1] == 999
    assert feature_plots._some(3, 40) == [0, 1, 2]


def test_frames_are_dropped_until_the_file_is_small(monkeypatch):
    whole = len(feature_plots.feature_animation([moving(4)]))
    monkeypatch.setattr(feature_plots, "MOST_BYTES", whole - 1)
    content = feature_plots.feature_animation([moving(4)])
    assert len(content) < whole
    assert opened(content).n_frames == 2
