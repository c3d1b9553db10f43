"""SphereFace2's bias at first, with which the label and all others pull equally."""

import pytest
import torch

from dcnet.losses import Annealing, Automatic, MarginSoftmax, SphereFace2
from dcnet.losses.annealing import Easing

CLASSES, SCALES = (2, 3, 4, 10, 1000), (1.0, 40.0, 64.0, 1000.0)


def pulls(margin: SphereFace2, classes: int, scale: float, annealing: Easing | None = None) -> tuple[float, float]:
    """The gradient of the loss by the bias where all weights are orthogonal to the feature, and the label's part."""
    head = MarginSoftmax(3, classes, margin, scale=scale, annealing=annealing).double().eval()
    head.reset_parameters()
    with torch.no_grad():
        head.weight.copy_(torch.eye(3, dtype=torch.float64)[:1].expand(classes, 3))
    feature = torch.eye(3, dtype=torch.float64)[2:]
    assert head.offset is not None
    (gradient,) = torch.autograd.grad(head(feature, torch.tensor([0])), head.offset)
    zero = torch.zeros((), dtype=torch.float64)
    label = scale * head.first_share * margin.target(zero) + head.offset
    return gradient.item(), (margin.share / scale * torch.sigmoid(-label)).item()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.7, 0.99])
@pytest.mark.parametrize("m", [0.0, 0.4, 0.9])
def test_label_and_others_pull_equally(m: float, share: float):
    for classes in CLASSES:
        for scale in SCALES:
            gradient, of_label = pulls(SphereFace2(m=m, share=share), classes, scale)
            assert of_label > 0, (classes, scale)
            assert abs(gradient) < 1e-6 * of_label, (classes, scale)


@pytest.mark.parametrize("annealing", [Annealing(), Annealing(start=3, rate=1, floor=1), Automatic()], ids=str)
def test_they_do_so_by_as_much_of_the_margin_as_is_let_in_at_first(annealing: Easing):
    for classes in CLASSES:
        gradient, of_label = pulls(SphereFace2(), classes, 40.0, annealing)
        assert abs(gradient) < 1e-6 * of_label, classes


def test_few_classes_and_large_scales_are_no_error():
    assert MarginSoftmax(8, 2, "sphereface2", scale=64.0).offset.isfinite()
    assert MarginSoftmax(8, 3, "sphereface2(m=0.9)").offset.isfinite()
    # Two classes that weigh alike: the bias is in the middle, however far both are from it.
    margin = SphereFace2(m=0.9, share=0.5)
    assert margin.first_bias(2, 1000.0) == pytest.approx(750.0)
