"""Building blocks of transformers: tokens of patches, attention, and layers of tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcnet.layers import conv2d, linear
from dcnet.models.blocks import sequence
from dcnet.models.settings import Settings
from dcnet.tracing import is_symbolic

# The side of a patch, the number of blocks, the size of a head, and the hidden channels of the MLP by its channels.
PATCH, DEPTH, HEAD_SIZE, RATIO = 4, 12, 64, 4
POSITION_DEVIATION = 0.02
# The defaults of the networks.
DEFAULTS = {"norm": "layer", "activation": "gelu", "init": nn.init.xavier_uniform_, "classifier_bias": True}


class Embedding(nn.Module):
    """One token for each patch, plus a learned one for its position: [N, C, H, W] -> [N, T, channels]."""

    def __init__(self, settings: Settings, channels: int):
        super().__init__()
        self.image_size, operator = settings.image_size, settings.operator
        if self.image_size % PATCH:
            raise ValueError(f"image_size must be a multiple of {PATCH}, the side of a patch, not {self.image_size}")
        self.conv = conv2d(settings.in_channels, channels, PATCH, PATCH, bias=False, operator=operator)
        # A patch is a vector: the fans of a convolution would count overlapping windows.
        settings.init(self.conv.weight.detach().flatten(1))
        self.position = nn.Parameter(torch.empty((self.image_size // PATCH) ** 2, channels))
        nn.init.trunc_normal_(self.position, std=POSITION_DEVIATION)

    def forward(self, input: Tensor) -> Tensor:
        if not is_symbolic(input) and input.shape[2:] != (self.image_size, self.image_size):
            sides = " x ".join(str(side) for side in input.shape[2:])
            raise ValueError(
                f"image_size={self.image_size} does not fit these images, which have {sides} pixels: "
                "create the model with the size of the images"
            )
        return self.conv(input).flatten(2).transpose(1, 2) + self.position


class Attention(nn.Module):
    """Attention of all tokens to all tokens, [N, T, C] -> [N, T, C], with projections of any operator.

    Heads have 64 channels if the channels are a multiple of 64. Otherwise there is one head for each full 64
    channels, or fewer, so that all have the same size.
    """

    # As in timm: the scores come from scaled_dot_product_attention, so that `dcnet.decouple` can convert them.
    fused_attn = True

    def __init__(self, settings: Settings, channels: int):
        super().__init__()
        most = max(1, channels // HEAD_SIZE)
        self.num_heads = next(count for count in range(most, 0, -1) if channels % count == 0)
        self.qkv = linear(channels, 3 * channels, bias=False, operator=settings.operator)
        for part in self.qkv.weight.detach().chunk(3):
            settings.init(part)
        self.output = token_layer(settings, channels, channels)

    def forward(self, input: Tensor) -> Tensor:
        parts = self.qkv(input).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.output(self.attend(parts[0], parts[1], parts[2]).transpose(1, 2).flatten(2))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The attention itself, of tensors [N, heads, T, head size]; a subclass may compute another one."""
        return F.scaled_dot_product_attention(query, key, value)


class MeanOfTokens(nn.Module):
    """The mean of all tokens, [N, T, C] -> [N, C]."""

    def forward(self, input: Tensor) -> Tensor:
        return input.mean(dim=1)


class ChannelsSecond(nn.Module):
    """Applies a module to tokens [N, T, C] that expects the channels before the positions, [N, C, T]."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, input: Tensor) -> Tensor:
        return self.module(input.transpose(1, 2)).transpose(1, 2)


def token_layer(settings: Settings, in_channels: int, out_channels: int) -> nn.Linear:
    """A linear layer of tokens, with the operator and the initialization of the settings."""
    layer = linear(in_channels, out_channels, bias=False, operator=settings.operator)
    settings.init(layer.weight)
    return layer


def mlp(settings: Settings, channels: int, **between: nn.Module) -> nn.Sequential:
    """Two linear layers with four times the channels between them, other modules if given, and an activation."""
    hidden = RATIO * channels
    first, second = token_layer(settings, channels, hidden), token_layer(settings, hidden, channels)
    return sequence(first=first, **between, activation=token_activation(settings, hidden), second=second)


def token_norm(settings: Settings, channels: int) -> nn.Module:
    norm = settings.make_token_norm(channels)
    return ChannelsSecond(norm) if isinstance(norm, nn.BatchNorm1d) else norm


def token_activation(settings: Settings, channels: int) -> nn.Module:
    activation = settings.make_activation(channels)
    return ChannelsSecond(activation) if isinstance(activation, nn.PReLU) else activation
