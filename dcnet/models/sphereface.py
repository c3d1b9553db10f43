"""The networks of SphereFace: four stages of residual units without normalization, and a linear layer."""

from collections.abc import Sequence

from torch import Tensor, nn

from dcnet.layers import linear
from dcnet.models.blocks import Flatten, Network, conv_layer, sequence
from dcnet.models.create import register
from dcnet.models.settings import Settings, small_normal_

COUNTS, FEATURES = (64, 128, 256, 512), 512
DEFAULTS = {"norm": "none", "activation": "prelu", "init": nn.init.xavier_uniform_, "unit_init": small_normal_}


@register("sphereface20", **DEFAULTS)
def sphereface20(settings: Settings) -> Network:
    """SphereFace-20: 3, 5, 9 and 3 convolutions of 64, 128, 256 and 512 channels, and 512 features."""
    return _sphereface(settings, (1, 2, 4, 1))


@register("sphereface36", **DEFAULTS)
def sphereface36(settings: Settings) -> Network:
    """SphereFace-36: 5, 9, 17 and 5 convolutions of 64, 128, 256 and 512 channels, and 512 features."""
    return _sphereface(settings, (2, 4, 8, 2))


@register("sphereface64", **DEFAULTS)
def sphereface64(settings: Settings) -> Network:
    """SphereFace-64: 7, 17, 33 and 7 convolutions of 64, 128, 256 and 512 channels, and 512 features."""
    return _sphereface(settings, (3, 8, 16, 3))


class SphereUnit(nn.Module):
    """x + second(first(x)); both layers have an activation, the sum has none."""

    def __init__(self, settings: Settings, channels: int):
        super().__init__()
        self.first = conv_layer(settings, channels, channels, init=settings.unit_init)
        self.second = conv_layer(settings, channels, channels, init=settings.unit_init)

    def forward(self, input: Tensor) -> Tensor:
        return input + self.second(self.first(input))


def _sphereface(settings: Settings, units: Sequence[int]) -> Network:
    """Each stage starts with a convolution of stride 2, which halves the side, rounded up."""
    stages, channels, side = {}, settings.in_channels, settings.image_size
    for i, (count, repeats) in enumerate(zip(COUNTS, units, strict=True)):
        width = settings.channels(count)
        layers: dict[str, nn.Module] = {"lead": conv_layer(settings, channels, width, stride=2)}
        layers |= {f"unit{k + 1}": SphereUnit(settings, width) for k in range(repeats)}
        stages[f"conv{i + 1}"] = sequence(**layers)
        channels, side = width, (side + 1) // 2
    flat, num_features = channels * side * side, settings.channels(FEATURES)
    dense = linear(flat, num_features, bias=False, operator=settings.operator)
    settings.init(dense.weight)
    body = sequence(**stages, flatten=Flatten(flat, settings.image_size), dense=dense)
    return Network(settings, body, num_features)
