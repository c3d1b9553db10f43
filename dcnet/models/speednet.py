"""A small network for fast training: frozen whitening, three stages of two convolutions, and global maximum pooling."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcnet.models.blocks import Network, conv_layer, sequence
from dcnet.models.create import register
from dcnet.models.settings import Settings

# The side of the patches that are whitened.
PATCH = 2
# Added to the variances of patches, in units of normalized pixels.
WHITENING_EPS = 5e-4


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
