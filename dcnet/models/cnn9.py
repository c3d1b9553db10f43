"""Plain CNN-9: three stages of three convolutions, each followed by pooling, and a fully connected layer."""

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from dcnet.models.blocks import Flatten, Network, conv_layer, dense_layer, sequence
from dcnet.models.create import register
from dcnet.models.settings import Settings

LAYERS_A_STAGE = 3


@register("cnn9", classifier_bias=True)
def cnn9(settings: Settings) -> Network:
    """Plain CNN-9 of Tables 2 and 3: 64, 128, 256 channels, 512 features."""
    return _plain(settings, (64, 128, 256), 512)


@register("cnn9-small", classifier_bias=True)
def cnn9_small(settings: Settings) -> Network:
    """CNN-9 for the attacks of Tables 7 and 8: 32, 64, 128 channels, 256 features."""
    return _plain(settings, (32, 64, 128), 256)


@register("cnn9-bare", classifier_bias=True)
def cnn9_bare(settings: Settings) -> Network:
    """Plain CNN-9 without normalization and activation after the fully connected layer."""
    return _plain(settings, (64, 128, 256), 512, bare=True)


@register("cnn9-small-bare", classifier_bias=True)
def cnn9_small_bare(settings: Settings) -> Network:
    """CNN-9 for attacks, without normalization and activation after the fully connected layer."""
    return _plain(settings, (32, 64, 128), 256, bare=True)


def _plain(settings: Settings, counts: Sequence[int], features: int, bare: bool = False) -> Network:
    side = settings.image_size // 2 ** len(counts)
    if side == 0:
        raise ValueError(f"image_size must be {2 ** len(counts)} or more, not {settings.image_size}")
    widths = [settings.channels(count) for count in counts]
    sources = [settings.in_channels, *widths]
    stages = {f"conv{i + 1}": _stage(settings, sources[i], width) for i, width in enumerate(widths)}
    flat, num_features = widths[-1] * side * side, settings.channels(features)
    flatten = Flatten(flat, settings.image_size)
    dense = dense_layer(replace(settings, norm="none", activation="none") if bare else settings, flat, num_features)
    body = sequence(**stages, flatten=flatten, dense=dense)
    return Network(settings, body, num_features)


def _stage(settings: Settings, in_channels: int, out_channels: int) -> nn.Sequential:
    sources = [in_channels] + [out_channels] * (LAYERS_A_STAGE - 1)
    layers = {f"layer{i + 1}": conv_layer(settings, source, out_channels) for i, source in enumerate(sources)}
    return sequence(**layers, pool=nn.MaxPool2d(2))
