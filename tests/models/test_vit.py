"""Vision transformers compared with timm's and with torch's encoder; norms, heads, sizes, gradients and errors."""

import pytest
import torch
import torch.nn.functional as F
from helpers.packages import timm_or_skip
from torch import Tensor, nn

import dcnet
from dcnet.layers import Decoupled
from dcnet.models import Network, create_model
from dcnet.models.tokens import Attention, MeanOfTokens
from dcnet.models.vit import Block
from dcnet.robustness import certify

# Width 0.7 gives 134 channels and two heads.
TINY = {"num_classes": 5, "width": 0.7, "image_size": 16}


def tiny(operator: str = "conv", **given: object) -> Network:
    torch.manual_seed(0)
    return create_model("vit-tiny", operator, **{**TINY, **given}).double()


def images(size: int = 16) -> Tensor:
    return torch.randn(3, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def moved(model: Network) -> Network:
    """The network with random changes of all parameters, so that no gain is one and no shift is zero."""
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize(("name", "channels", "heads"), [("vit-tiny", 192, 3), ("vit-small", 384, 6)])
def test_parameters_and_heads(name: str, channels: int, heads: int) -> None:
    block = 12 * channels * channels + 4 * channels
    expected = 48 * channels + 64 * channels + 12 * block + 2 * channels + 100 * channels + 100
    outputs = channels + 12 * (3 + 1 + 4 + 1) * channels
    for operator, radii in {"conv": 0, "tanh-cos": outputs}.items():
        with torch.device("meta"):
            model = create_model(name, operator, 100)
        assert sum(parameter.numel() for parameter in model.parameters()) == expected + radii
        found = [module.num_heads for module in model.modules() if isinstance(module, Attention)]
        assert found == [heads] * 12
        assert sum(isinstance(module, Decoupled) for module in model.modules()) == (0 if operator == "conv" else 49)
    assert isinstance(model.body[-1], MeanOfTokens)


@pytest.mark.parametrize(("width", "heads"), [(2, 6), (4 / 3, 4), (1, 3), (0.7, 2), (0.5, 1), (0.01, 1), (1.51, 2)])
def test_heads_have_64_channels_where_possible(width: float, heads: int) -> None:
    with torch.device("meta"):
        model = create_model("vit-tiny", "conv", width=width)
    assert model.num_features == round(192 * width)
    assert model.body.block1.attention.num_heads == heads


def test_logits_are_those_of_timm() -> None:
    timm = timm_or_skip()
    own = moved(tiny())
    theirs = timm.models.vision_transformer.VisionTransformer(
        img_size=16, patch_size=4, embed_dim=134, depth=12, num_heads=2, num_classes=5, qkv_bias=False,
        class_token=False, global_pool="avg", fc_norm=False,
    ).double()  # fmt: skip
    names = {
        "body.embedding.conv.": "patch_embed.proj.", "body.embedding.position": "pos_embed", "body.norm.": "norm.",
        "body.block": "blocks.", "attention_norm": "norm1", "mlp_norm": "norm2", "attention.qkv": "attn.qkv",
        "attention.output": "attn.proj", "mlp.first": "mlp.fc1", "mlp.second": "mlp.fc2", "classifier": "head",
    }  # fmt: skip
    found = {name: torch.zeros_like(value) for name, value in theirs.state_dict().items()}
    for name, value in own.state_dict().items():
        for ours, other in names.items():
            name = name.replace(ours, other)
        if name.startswith("blocks."):
            _, number, rest = name.split(".", 2)
            name = f"blocks.{int(number) - 1}.{rest}"
        assert name in found
        found[name] = value[None] if name == "pos_embed" else value
    theirs.load_state_dict(found)
    torch.testing.assert_close(own.eval()(images()), theirs.eval()(images()), rtol=1e-9, atol=1e-9)


def test_a_block_is_that_of_an_encoder_of_torch() -> None:
    own: Block = moved(tiny()).body.block1
    theirs = nn.TransformerEncoderLayer(
        134, 2, 4 * 134, 0.0, "gelu", layer_norm_eps=1e-6, batch_first=True, norm_first=True, dtype=torch.float64
    )
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.zero_()
        theirs.self_attn.in_proj_weight.copy_(own.attention.qkv.weight)
        pairs = [
            (theirs.self_attn.out_proj, own.attention.output), (theirs.linear1, own.mlp.first),
            (theirs.linear2, own.mlp.second), (theirs.norm1, own.attention_norm), (theirs.norm2, own.mlp_norm),
        ]  # fmt: skip
        for to, source in pairs:
            to.load_state_dict(source.state_dict(), strict=False)
    tokens = torch.randn(3, 16, 134, dtype=torch.float64)
    torch.testing.assert_close(own(tokens), theirs(tokens), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("norm", ["layer", "rms", "batch", "none"])
def test_linear_cos_with_linear_weighting_is_the_plain_network(norm: str) -> None:
    plain, decoupled = tiny(norm=norm), tiny("linear-cos+linear", norm=norm)
    for module in decoupled.modules():
        if isinstance(module, Decoupled):
            module.eps = 0.0
    decoupled.load_state_dict(plain.state_dict())
    x = images()
    expected, found = plain(x), decoupled(x)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    for logits in (expected, found):
        F.cross_entropy(logits, torch.arange(3)).backward()
    for one, other in zip(plain.parameters(), decoupled.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-8, atol=1e-10)


KINDS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "batch": nn.BatchNorm1d}


@pytest.mark.parametrize("norm", KINDS)
def test_norms_are_before_attention_and_mlp_and_at_the_end(norm: str) -> None:
    model = tiny(norm=norm, width=0.1)
    found = [name for name, module in model.named_modules() if type(module) is KINDS[norm]]
    assert len(found) == 25
    assert all("attention_norm" in name or "mlp_norm" in name or name.startswith("body.norm") for name in found)
    assert {module.eps for module in model.modules() if type(module) is KINDS[norm]} == {
        1e-3 if norm == "batch" else 1e-6
    }
    changed = tiny(norm=norm, width=0.1, norm_eps=0.5)
    assert {module.eps for module in changed.modules() if type(module) is KINDS[norm]} == {0.5}


def test_batch_normalization_and_prelu_act_on_channels() -> None:
    block = tiny(norm="batch", activation="prelu", width=0.1).body.block1
    tokens = torch.randn(3, 16, 19, dtype=torch.float64)
    rows = F.batch_norm(tokens.flatten(0, 1), None, None, training=True, eps=1e-3)
    torch.testing.assert_close(block.mlp_norm(tokens), rows.view_as(tokens))
    with torch.no_grad():
        block.mlp.activation.module.weight.uniform_()
    hidden = torch.randn(3, 16, 76, dtype=torch.float64)
    expected = torch.where(hidden > 0, hidden, hidden * block.mlp.activation.module.weight)
    torch.testing.assert_close(block.mlp.activation(hidden), expected)


def test_the_default_activation_is_gelu_and_others_are_options() -> None:
    for given, kind in {"": nn.GELU, "relu": nn.ReLU, "none": nn.Identity}.items():
        model = tiny(width=0.1, activation=given or None)
        assert type(model.body.block3.mlp.activation) is kind


def test_without_positions_the_order_of_patches_has_no_effect() -> None:
    model, x = tiny("tanh-cos", width=0.1), images()
    model(x)
    model.eval()
    swapped = torch.cat([x[..., 8:], x[..., :8]], dim=-1)
    assert not torch.allclose(model(x), model(swapped))
    nn.init.zeros_(model.body.embedding.position)
    torch.testing.assert_close(model(x), model(swapped))


def test_a_subclass_can_compute_another_attention() -> None:
    class Mean(Attention):
        def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return value.mean(dim=2, keepdim=True).expand_as(value)

    model = tiny(width=0.7)
    layer = model.body.block1.attention
    layer.__class__ = Mean
    tokens = torch.randn(2, 16, 134, dtype=torch.float64)
    values = F.linear(tokens, layer.qkv.weight[2 * 134 :]).mean(dim=1, keepdim=True).expand_as(tokens)
    torch.testing.assert_close(layer(tokens), layer.output(values))


def test_a_transformer_learns() -> None:
    model = tiny("tanh-cos", width=0.1, num_classes=3).float()
    x, labels = images().float(), torch.arange(3)
    optimizer = torch.optim.AdamW(dcnet.optim.param_groups(model, 0.05), 3e-3)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize("size", [3, 30, 33])
def test_sizes_that_patches_do_not_divide_are_rejected(size: int) -> None:
    with pytest.raises(ValueError, match=f"image_size must be a multiple of 4, the side of a patch, not {size}"):
        create_model("vit-tiny", image_size=size)


def test_images_of_another_size_are_rejected() -> None:
    with pytest.raises(ValueError, match="image_size=16 does not fit these images, which have 18 x 18 pixels: create"):
        tiny(width=0.1)(images(18))


@pytest.mark.parametrize("name", ["vit-tiny", "vit-tiny-normalized"])
def test_a_certificate_says_that_it_does_not_apply(name: str) -> None:
    model = create_model(name, "ball-cos", 5, width=0.05, image_size=16).eval()
    with pytest.raises(
        ValueError, match=r"'body.embedding'.* makes the tokens of a transformer, .*convolutional network"
    ):
        certify(model, epsilon=0.1, image_size=16)


@pytest.mark.parametrize("name", ["vit-tiny", "vit-tiny-normalized"])
def test_exported_and_compiled_blocks_take_any_batch_size(name: str) -> None:
    model = create_model(name, "tanh-cos", 5, width=0.05, image_size=16)
    block, tokens = model.body.block1, torch.randn(3, 16, model.num_features)
    block(tokens)
    block.eval()
    program = torch.export.export(block, (tokens,), dynamic_shapes=({0: torch.export.Dim("n", min=2)},)).module()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for other in (program, compiled):
        torch.testing.assert_close(other(tokens[:2]), block(tokens[:2]))
