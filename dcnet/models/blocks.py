"""The pieces that all networks are put together from."""

from collections import OrderedDict

from torch import Tensor, nn

from dcnet.layers import conv2d, linear
from dcnet.models.settings import Initializer, Settings
from dcnet.opaque import is_symbolic
from dcnet.operator import PLAIN, Operator


class Network(nn.Module):
    """A body that makes features of images, [N, C, H, W] -> [N, num_features], and a classifier of features."""

    def __init__(self, settings: Settings, body: nn.Sequential, num_features: int):
        super().__init__()
        self.num_features = num_features
        self.body = body
        self.classifier = settings.make_classifier(num_features)

    def features(self, input: Tensor) -> Tensor:
        """What the classifier sees: [N, C, H, W] -> [N, num_features]."""
        if not is_symbolic(input) and input.dim() != 4:
            raise ValueError(f"input of shape {list(input.shape)} must be a batch of images, [N, C, H, W]")
        return self.body(input)

    def forward(self, input: Tensor) -> Tensor:
        return self.classifier(self.features(input))


def sequence(**modules: nn.Module) -> nn.Sequential:
    """The modules one after the other, under their names."""
    return nn.Sequential(OrderedDict(modules))


def conv_layer(
    settings: Settings,
    in_channels: int,
    out_channels: int,
    kernel_size: int = 3,
    stride: int = 1,
    *,
    operator: Operator | str | None = None,
    init: Initializer | None = None,
    activate: bool = True,
) -> nn.Sequential:
    """Convolution, normalisation and activation; the image keeps its size but for the stride."""
    conv = conv2d(
        in_channels,
        out_channels,
        kernel_size,
        stride,
        kernel_size // 2,
        bias=False,
        operator=settings.operator if operator is None else operator,
    )
    (init or settings.init)(conv.weight)
    layers: dict[str, nn.Module] = {"conv": conv, "norm": settings.make_norm(out_channels)}
    if activate:
        layers["activation"] = settings.make_activation(out_channels)
    return sequence(**layers)


def dense_layer(settings: Settings, in_features: int, out_features: int) -> nn.Sequential:
    """Fully connected layer, normalisation and activation."""
    dense = linear(in_features, out_features, bias=False, operator=settings.operator)
    settings.init(dense.weight)
    norm, activation = settings.make_norm(out_features, spatial=False), settings.make_activation(out_features)
    return sequence(linear=dense, norm=norm, activation=activation)


class Unit(nn.Module):
    """activation(second(first(x)) + shortcut(x)), where the shortcut is x itself if the shapes agree.

    Otherwise it is a 1x1 convolution, never a decoupled one: it carries x on, and does not look for anything in it.
    """

    def __init__(self, settings: Settings, in_channels: int, out_channels: int, stride: int, activate: bool):
        super().__init__()
        init = settings.unit_init
        self.first = conv_layer(settings, in_channels, out_channels, stride=stride, init=init)
        self.second = conv_layer(settings, out_channels, out_channels, init=init, activate=False)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = conv_layer(settings, in_channels, out_channels, 1, stride, operator=PLAIN, activate=False)
        self.activation = settings.make_activation(out_channels) if activate else nn.Identity()

    def forward(self, input: Tensor) -> Tensor:
        return self.activation(self.second(self.first(input)) + self.shortcut(input))


class Flatten(nn.Flatten):
    """[N, C, H, W] -> [N, C * H * W], which must be what the next layer expects of images of `image_size`."""

    def __init__(self, features: int, image_size: int):
        super().__init__()
        self.features, self.image_size = features, image_size

    def forward(self, input: Tensor) -> Tensor:
        rows = super().forward(input)
        if not is_symbolic(input) and rows.shape[1] != self.features:
            left = " x ".join(str(side) for side in input.shape[2:])
            raise ValueError(
                f"the images leave {left} pixels after pooling, which does not fit image_size={self.image_size}: "
                "create the model with the size they have"
            )
        return rows
