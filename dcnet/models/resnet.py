"""Residual networks with two convolutions per unit: ResNet-32 for CIFAR, standard and modified ResNet-18."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from dcnet.models.blocks import Network, Unit, conv_layer, sequence
from dcnet.models.create import register
from dcnet.models.settings import Settings, small_normal_


@dataclass(frozen=True)
class Stage:
    """Units of one width; the first one, or a leading convolution, has the stride."""

    count: int
    units: int
    stride: int = 2
    led: bool = False


@register("resnet32")
def resnet32(settings: Settings) -> Network:
    """ResNet-32 for CIFAR of Tables 1, 4 and 5: 96, 192, 384 channels."""
    width = settings.channels(96)
    root = conv_layer(settings, settings.in_channels, width, activate=False)
    return _resnet(settings, root, width, [Stage(96, 5, stride=1), Stage(192, 5), Stage(384, 5)])


@register("resnet18", init=nn.init.xavier_uniform_, unit_init=small_normal_, classifier_bias=True)
def resnet18(settings: Settings) -> Network:
    """The standard ResNet-18 of Table 6: 64, 128, 256, 512 channels."""
    width = settings.channels(64)
    stages = [Stage(64, 2, stride=1), Stage(128, 2), Stage(256, 2), Stage(512, 2)]
    return _resnet(settings, _pooled_root(settings, width), width, stages)


@register("resnet18-modified", activation="prelu", init=nn.init.xavier_uniform_, unit_init=small_normal_)
def resnet18_modified(settings: Settings) -> Network:
    """The modified ResNet-18 of Table 6: 128, 256, 512, 1024 channels, and no activation after the additions."""
    width = settings.channels(128)
    stages = [Stage(128, 1, led=True), Stage(256, 2, led=True), Stage(512, 3, led=True), Stage(1024, 0, led=True)]
    return _resnet(settings, _pooled_root(settings, width), width, stages, activate_sum=False)


def _pooled_root(settings: Settings, width: int) -> nn.Sequential:
    root = conv_layer(settings, settings.in_channels, width, kernel_size=7, stride=2)
    root.add_module("pool", nn.MaxPool2d(3, stride=2, padding=1))
    return root


def _resnet(
    settings: Settings, root: nn.Sequential, width: int, stages: Sequence[Stage], activate_sum: bool = True
) -> Network:
    blocks = {"conv0": root}
    for i, stage in enumerate(stages):
        blocks[f"conv{i + 1}"] = _stage(settings, stage, width, activate_sum)
        width = settings.channels(stage.count)
    body = sequence(**blocks, pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten())
    return Network(settings, body, width)


def _stage(settings: Settings, stage: Stage, in_channels: int, activate_sum: bool) -> nn.Sequential:
    width, stride, layers = settings.channels(stage.count), stage.stride, dict[str, nn.Module]()
    if stage.led:
        layers["lead"] = conv_layer(settings, in_channels, width, stride=stride)
        in_channels, stride = width, 1
    for i in range(stage.units):
        layers[f"unit{i + 1}"] = Unit(settings, in_channels, width, stride, activate_sum)
        in_channels, stride = width, 1
    return sequence(**layers)
