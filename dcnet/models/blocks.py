"""Building blocks of the networks, and wrappers with a margin head or pixel normalization."""

from collections import OrderedDict
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcnet.layers import conv2d, linear
from dcnet.losses import MarginSoftmax, ShardedMarginSoftmax
from dcnet.models.settings import Initializer, Settings
from dcnet.operator import PLAIN, Operator
from dcnet.tracing import is_symbolic

# Added to the variance of an image in [0, 1], so that images of one color become zeros.
FLAT = 1e-6
# The side of the patches that are whitened.
PATCH = 2
# Added to the variances of patches, in units of normalized pixels.
WHITENING_EPS = 5e-4


class Network(nn.Module):
    """A body that computes features of images, [N, C, H, W] -> [N, num_features], and a classifier."""

    def __init__(self, settings: Settings, body: nn.Sequential, num_features: int):
        super().__init__()
        self.num_features = num_features
        self.body = body
        self.classifier = settings.make_classifier(num_features)

    def features(self, input: Tensor) -> Tensor:
        """The input of the classifier: [N, C, H, W] -> [N, num_features]."""
        if not is_symbolic(input) and input.dim() != 4:
            raise ValueError(f"input of shape {list(input.shape)} must be a batch of images, [N, C, H, W]")
        return self.body(input)

    def forward(self, input: Tensor) -> Tensor:
        return self.classifier(self.features(input))


def sequence(**modules: nn.Module) -> nn.Sequential:
    """An nn.Sequential with named modules."""
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
    """Convolution, normalization and activation; only the stride changes the size of the image."""
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
    """Fully connected layer, normalization and activation."""
    dense = linear(in_features, out_features, bias=False, operator=settings.operator)
    settings.init(dense.weight)
    norm, activation = settings.make_norm(out_features, spatial=False), settings.make_activation(out_features)
    return sequence(linear=dense, norm=norm, activation=activation)


class Unit(nn.Module):
    """activation(second(first(x)) + shortcut(x)); the shortcut is the identity if the shapes agree.

    Otherwise the shortcut is a plain 1x1 convolution, since it only passes x on and detects no features.
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
    """[N, C, H, W] -> [N, C * H * W]; checks that it has the number of features for images of `image_size`."""

    def __init__(self, features: int, image_size: int):
        super().__init__()
        self.features, self.image_size = features, image_size

    def forward(self, input: Tensor) -> Tensor:
        rows = super().forward(input)
        if not is_symbolic(input) and rows.shape[1] != self.features:
            left = " x ".join(str(side) for side in input.shape[2:])
            raise ValueError(
                f"image_size={self.image_size} does not fit these images, which have {left} pixels after pooling: "
                "create the model with the size of the images"
            )
        return rows


class MarginNetwork(nn.Module):
    """A network with a margin head: logits of images, and with labels also the loss.

    Args:
        body: a network that returns its features, created with num_classes=0.
        head: a head for that number of features.
        features: the size of a linear layer between body and head; None for no such layer.
    """

    def __init__(self, body: Network, head: MarginSoftmax, features: int | None = None):
        super().__init__()
        self.body, self.head = body, head
        self.num_features = features or body.num_features
        self.embedding = nn.Identity() if features is None else nn.Linear(body.num_features, features)
        if head.in_features != self.num_features:
            raise ValueError(f"the head must take the network's {self.num_features} features, not {head.in_features}")

    def features(self, input: Tensor) -> Tensor:
        """The input of the head: [N, C, H, W] -> [N, num_features]."""
        return self.embedding(self.body(input))

    def forward(self, input: Tensor, labels: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The logits without a margin; with labels, the loss with the margin, and the logits.

        With labels, a sharded head returns the predicted classes instead of the logits.
        """
        features = self.features(input)
        if labels is None:
            return self.head.logits(features)
        return self.head.loss_and_predictions(features, labels)


class Normalized(nn.Module):
    """network((x - mean) / std): normalization is part of the network, so that attacks act on pixels in [0, 1]."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.network = network
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))

    def forward(self, input: Tensor, *labels: Tensor) -> Tensor:
        """The output of the network; a network with a head also takes labels."""
        return self.network(self.normalize(input), *labels)

    def normalize(self, input: Tensor) -> Tensor:
        return (input - self.mean) / self.std

    def features(self, input: Tensor) -> Tensor:
        """The input of the classifier."""
        return self.network.features(self.normalize(input))  # type: ignore[operator]


def head_of_shards(model: nn.Module) -> ShardedMarginSoftmax | None:
    """The head of a network whose classes are divided among several processes; None for all other networks."""
    network = model.network if isinstance(model, Normalized) else model
    head = network.head if isinstance(network, MarginNetwork) else None
    return head if isinstance(head, ShardedMarginSoftmax) and head.world > 1 else None


class Standardized(Normalized):
    """A network whose images are standardized one by one to mean 0 and deviation 1; mean and std are not used.

    Args:
        dims: the dimensions that have one mean: (2, 3) for each channel, (1, 2, 3) for all channels together.
        center: whether to subtract the mean; otherwise images are scaled to a mean square of 1.
    """

    def __init__(
        self,
        network: nn.Module,
        mean: Sequence[float],
        std: Sequence[float],
        dims: tuple[int, ...] = (1, 2, 3),
        center: bool = True,
    ):
        super().__init__(network, mean, std)
        self.dims, self.center = dims, center

    def normalize(self, input: Tensor) -> Tensor:
        centered = input - input.mean(self.dims, keepdim=True) if self.center else input
        return centered / (centered.square().mean(self.dims, keepdim=True) + FLAT).sqrt()


class Whitening(nn.Module):
    """A fixed convolution whose outputs for the patches of natural images are uncorrelated, with variance 1.

    Each of the filters is there twice, with both signs, since an activation follows. They are orthonormal until `fit_`
    computes them from images.
    """

    weight: Tensor

    def __init__(self, in_channels: int, patch: int = PATCH):
        super().__init__()
        self.patch = patch
        size = in_channels * patch * patch
        filters = nn.init.orthogonal_(torch.empty(size, size)).view(size, in_channels, patch, patch)
        # A buffer, since it is not trained.
        self.register_buffer("weight", torch.cat([filters, -filters]))

    @property
    def out_channels(self) -> int:
        return len(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        """[N, C, H, W] -> [N, 2 C p^2, H - p + 1, W - p + 1] for patches of side p."""
        return F.conv2d(input, self.weight)

    @torch.no_grad()
    def fit_(self, images: Tensor, eps: float = WHITENING_EPS) -> None:
        """Sets the filters to v / sqrt(l + eps), with the eigenvectors v and eigenvalues l of E[x x'] of patches x."""
        patches = F.unfold(images.double(), self.patch).transpose(1, 2).flatten(0, 1)
        values, vectors = torch.linalg.eigh(patches.mT @ patches / len(patches))
        filters = (vectors / (values + eps).sqrt()).mT.reshape(-1, *self.weight.shape[1:])
        self.weight.copy_(torch.cat([filters, -filters]))
