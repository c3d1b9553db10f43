"""Vision transformers for small images: patches of 4 x 4 pixels, and their mean instead of a class token."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcnet.models.blocks import Network, sequence
from dcnet.models.create import register
from dcnet.models.settings import Settings
from dcnet.models.tokens import DEFAULTS, DEPTH, RATIO, Attention, Embedding, MeanOfTokens, mlp, token_norm

# The first step of a token of the normalized network towards the output of a block.
STEP = 0.05


@register("vit-tiny", **DEFAULTS)
def vit_tiny(settings: Settings) -> Network:
    """ViT-Ti for small images: patches of 4 x 4, 12 blocks of 192 channels, 3 heads."""
    return _vit(settings, 192)


@register("vit-small", **DEFAULTS)
def vit_small(settings: Settings) -> Network:
    """ViT-S for small images: patches of 4 x 4, 12 blocks of 384 channels, 6 heads."""
    return _vit(settings, 384)


def _vit(settings: Settings, count: int) -> Network:
    channels = settings.channels(count)
    blocks = {f"block{i + 1}": Block(settings, channels) for i in range(DEPTH)}
    ends = {"norm": token_norm(settings, channels), "pool": MeanOfTokens()}
    return Network(settings, sequence(embedding=Embedding(settings, channels), **blocks, **ends), channels)


class Block(nn.Module):
    """y = x + attention(norm(x)), then y + mlp(norm(y))."""

    def __init__(self, settings: Settings, channels: int):
        super().__init__()
        self.attention_norm = token_norm(settings, channels)
        self.attention = Attention(settings, channels)
        self.mlp_norm = token_norm(settings, channels)
        self.mlp = mlp(settings, channels)

    def forward(self, input: Tensor) -> Tensor:
        between = input + self.attention(self.attention_norm(input))
        return between + self.mlp(self.mlp_norm(between))


@register("vit-tiny-normalized", **{**DEFAULTS, "norm": "none"})
def vit_tiny_normalized(settings: Settings) -> Network:
    """vit-tiny with tokens on the unit sphere, as in nGPT: no LayerNorm, learned steps along the sphere."""
    if settings.norm != "none":
        raise ValueError(f"norm must be 'none', since all tokens have norm 1 already, not {settings.norm!r}")
    channels = settings.channels(192)
    blocks = {f"block{i + 1}": SphereBlock(settings, channels) for i in range(DEPTH)}
    ends = {"pool": MeanOfTokens(), "unit": Unit(), "scale": Scale(channels, math.sqrt(channels))}
    body = sequence(embedding=Embedding(settings, channels), start=Unit(), **blocks, **ends)
    return Network(settings, body, channels)


class Unit(nn.Module):
    """x / ||x|| for each token."""

    def forward(self, input: Tensor) -> Tensor:
        return F.normalize(input, dim=-1)


class Scale(nn.Module):
    """input * first * (1 + sqrt(channels) * weight), a learned scale per channel.

    The weight starts at zero, so that its decay pulls the scale to its first value. The root makes a step of Adam as
    large for the scale as for a channel of a unit vector, as in nGPT.
    """

    def __init__(self, channels: int, first: float):
        super().__init__()
        self.first, self.rate = first, math.sqrt(channels)
        self.weight = nn.Parameter(torch.zeros(channels))

    def forward(self, input: Tensor) -> Tensor:
        return input * (self.first * (1 + self.rate * self.weight))


class SphereAttention(Attention):
    """Attention with queries and keys of norm 1, both times a learned scale per channel of a head.

    With the first scales, the scores are sqrt(head size) * cosine.
    """

    def __init__(self, settings: Settings, channels: int):
        super().__init__(settings, channels)
        size = channels // self.num_heads
        self.scale = Scale(size, math.sqrt(size))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return super().attend(self.scale(F.normalize(query, dim=-1)), self.scale(F.normalize(key, dim=-1)), value)


class SphereBlock(nn.Module):
    """h <- normalize(h + step * (normalize(layer(h)) - h)) for the attention, then for the MLP."""

    def __init__(self, settings: Settings, channels: int):
        super().__init__()
        self.attention = SphereAttention(settings, channels)
        # Without the scale, the activation would get numbers of the size of a cosine.
        self.mlp = mlp(settings, channels, scale=Scale(RATIO * channels, math.sqrt(channels)))
        self.attention_step, self.mlp_step = Scale(channels, STEP), Scale(channels, STEP)

    def forward(self, input: Tensor) -> Tensor:
        between = self._moved(input, self.attention(input), self.attention_step)
        return self._moved(between, self.mlp(between), self.mlp_step)

    def _moved(self, tokens: Tensor, target: Tensor, step: Scale) -> Tensor:
        return F.normalize(tokens + step(F.normalize(target, dim=-1) - tokens), dim=-1)
