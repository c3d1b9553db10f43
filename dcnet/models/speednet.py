"""A small network for fast training: frozen whitening, three stages of two convolutions, and global maximum pooling."""

from torch import Tensor, nn

from dcnet.models.blocks import Network, Whitening, conv_layer, sequence
from dcnet.models.create import register
from dcnet.models.settings import Settings


class GlobalMax(nn.Module):
    """The maximum over all positions: [N, C, H, W] -> [N, C]."""

    def forward(self, input: Tensor) -> Tensor:
        return input.amax((2, 3))


@register("speednet")
def speednet(settings: Settings) -> Network:
    """A small network for images of any size from 4 pixels on: 128, 384, 512 channels."""
    whitening = Whitening(settings.in_channels)
    widths = [settings.channels(count) for count in (128, 384, 512)]
    sources = [whitening.out_channels, *widths]
    stages = {f"conv{i + 1}": _stage(settings, sources[i], width) for i, width in enumerate(widths)}
    start = sequence(whitening=whitening, activation=settings.make_activation(whitening.out_channels))
    return Network(settings, sequence(conv0=start, **stages, pool=GlobalMax()), widths[-1])


def _stage(settings: Settings, in_channels: int, out_channels: int) -> nn.Sequential:
    """Two convolutions with normalization and activation; pooling follows the first convolution immediately."""
    parts = dict(conv_layer(settings, in_channels, out_channels).named_children())
    first = sequence(conv=parts.pop("conv"), pool=nn.MaxPool2d(2, ceil_mode=True), **parts)
    return sequence(first=first, second=conv_layer(settings, out_channels, out_channels))
