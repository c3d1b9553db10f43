"""Vision transformers for small images: patches of 4 x 4 pixels, and their mean instead of a class token."""

from torch import Tensor, nn

from dcnet.models.blocks import Network, sequence
from dcnet.models.create import register
from dcnet.models.settings import Settings
from dcnet.models.tokens import DEFAULTS, DEPTH, Attention, Embedding, MeanOfTokens, mlp, token_norm


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
