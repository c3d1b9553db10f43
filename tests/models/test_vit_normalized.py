"""The normalized transformer: tokens on the unit sphere, a block in loops, and norms of filters without effect."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dcnet
from dcnet.layers import Decoupled
from dcnet.models import Network, create_model
from dcnet.models.vit import Scale, SphereBlock


def tiny(operator: str = "conv", **given: object) -> Network:
    torch.manual_seed(0)
    return create_model("vit-tiny-normalized", operator, 5, width=0.7, image_size=16, **given).double()


def images() -> Tensor:
    return torch.randn(3, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def moved(model: Network) -> Network:
    for parameter in model.parameters():
        parameter.add_(0.02 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("operator", ["conv", "tanh-cos"])
def test_tokens_stay_on_the_unit_sphere(operator: str) -> None:
    model, found = moved(tiny(operator)), []
    for name, module in model.body.named_children():
        if name.startswith(("block", "start")):
            module.register_forward_hook(lambda module, args, output: found.append(output.norm(dim=-1)))
    model(images())
    assert len(found) == 13
    torch.testing.assert_close(torch.stack(found), torch.ones_like(torch.stack(found)))


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def attention_in_loops(block: SphereBlock, tokens: Tensor) -> Tensor:
    """One image, [T, C], head by head and token by token."""
    layer, (count, channels) = block.attention, tokens.shape
    query, key, value = (tokens @ part.T for part in layer.qkv.weight.chunk(3))
    size, heads = channels // layer.num_heads, []
    scale = 1 + size**0.5 * layer.scale.weight
    for start in range(0, channels, size):
        q, k, v = (part[:, start : start + size] for part in (query, key, value))
        scores = [[size**0.5 * (unit(a) * scale) @ (unit(b) * scale) for b in k] for a in q]
        shares = [torch.stack(row).exp() / torch.stack(row).exp().sum() for row in scores]
        heads.append(torch.stack([sum(row[i] * v[i] for i in range(count)) for row in shares]))
    return torch.cat(heads, dim=1) @ layer.output.weight.T


@torch.no_grad()
def test_a_block_computes_its_equation() -> None:
    block: SphereBlock = moved(tiny()).body.block2
    tokens = unit(torch.randn(5, 134, dtype=torch.float64))
    root = 134**0.5
    step = 0.05 * (1 + root * block.attention_step.weight)
    between = unit(tokens + step * (unit(attention_in_loops(block, tokens)) - tokens))
    hidden = between @ block.mlp.first.weight.T * root * (1 + (4 * 134) ** 0.5 * block.mlp.scale.weight)
    target = F.gelu(hidden) @ block.mlp.second.weight.T
    step = 0.05 * (1 + root * block.mlp_step.weight)
    expected = unit(between + step * (unit(target) - between))
    torch.testing.assert_close(block(tokens[None])[0], expected, rtol=1e-9, atol=1e-9)


def test_with_linear_cos_all_filters_are_unit_vectors() -> None:
    """As in nGPT, and without a projection: the norms of filters have no effect on the output."""
    model = tiny("linear-cos", classifier="normalized")
    for module in model.modules():
        if isinstance(module, Decoupled):
            module.eps = 0.0
    expected = model(images())
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Decoupled):
                module.weight.mul_(1 + 3 * torch.rand(len(module.weight), *[1] * (module.weight.dim() - 1)))
    torch.testing.assert_close(model(images()), expected, rtol=1e-9, atol=1e-9)


def test_scales_start_at_their_first_value_and_decay_to_it() -> None:
    scale, x = Scale(16, 3.0), torch.randn(2, 16)
    torch.testing.assert_close(scale(x), 3 * x)
    torch.nn.init.constant_(scale.weight, 0.1)
    torch.testing.assert_close(scale(x), 3 * 1.4 * x)
    optimizer = torch.optim.AdamW(dcnet.optim.param_groups(scale, 0.5), 1.0)
    scale.weight.grad = torch.zeros(16)
    optimizer.step()
    torch.testing.assert_close(scale(x), 3 * 1.2 * x)


@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_a_norm_is_rejected(norm: str) -> None:
    with pytest.raises(ValueError, match=f"norm must be 'none', since all tokens have norm 1 already, not '{norm}'"):
        tiny(norm=norm)
