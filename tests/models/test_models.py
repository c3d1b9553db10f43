"""The networks compared with the architecture table of the paper, and with all settings."""

import copy
import io
import math
import pickle
import sys

import pytest
import torch
from torch import Tensor, nn

from dcnet import Operator
from dcnet.layers import Decoupled, DecoupledLinear
from dcnet.models import Network, create_model, networks, register, register_prefix
from dcnet.models.create import prefixes
from dcnet.models.settings import group_count

NAMES = list(networks)
CLASSES = 7
SMALL = {"width": 0.04, "num_classes": CLASSES}


def small(name: str, **given: object) -> Network:
    torch.manual_seed(0)
    return create_model(name, **{**SMALL, **given})


def images(count: int = 4, size: int = 32, channels: int = 3) -> Tensor:
    return torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(1))


def stage_outputs(model: Network, input: Tensor) -> list[torch.Size]:
    """The output shape of each stage: conv0, conv1, ..."""
    found: list[torch.Size] = []
    for key, part in model.body.named_children():
        if key.startswith("conv"):
            part.register_forward_hook(lambda module, args, output: found.append(output.shape))
    model(input)
    return found


def chain(source: int, *widths: int) -> int:
    """The number of weights of a sequence of 3x3 convolutions."""
    sources = [source, *widths]
    return sum(9 * sources[i] * width for i, width in enumerate(widths))


# Name -> classes, weights without normalization and activation, channels of every normalized layer on the way, and of
# every normalized shortcut. The rows are those of the table.
TABLE = {
    "cnn9": (
        100,
        chain(3, *[64] * 3, *[128] * 3, *[256] * 3) + 4 * 4 * 256 * 512 + 512 * 100 + 100,
        3 * (64 + 128 + 256) + 512,
        0,
    ),
    "cnn9-small": (
        10,
        chain(3, *[32] * 3, *[64] * 3, *[128] * 3) + 4 * 4 * 128 * 256 + 256 * 10 + 10,
        3 * (32 + 64 + 128) + 256,
        0,
    ),
    "cnn9-bare": (
        100,
        chain(3, *[64] * 3, *[128] * 3, *[256] * 3) + 4 * 4 * 256 * 512 + 512 * 100 + 100,
        3 * (64 + 128 + 256),
        0,
    ),
    "cnn9-small-bare": (
        10,
        chain(3, *[32] * 3, *[64] * 3, *[128] * 3) + 4 * 4 * 128 * 256 + 256 * 10 + 10,
        3 * (32 + 64 + 128),
        0,
    ),
    "resnet32": (
        100,
        chain(3, 96, *[96] * 10, *[192] * 10, *[384] * 10) + 96 * 192 + 192 * 384 + 384 * 100,
        96 + 10 * (96 + 192 + 384),
        192 + 384,
    ),
    "resnet18": (
        1000,
        49 * 3 * 64
        + chain(64, *[64] * 4, *[128] * 4, *[256] * 4, *[512] * 4)
        + (64 * 128 + 128 * 256 + 256 * 512)
        + (512 * 1000 + 1000),
        64 + 4 * (64 + 128 + 256 + 512),
        128 + 256 + 512,
    ),
    "resnet18-modified": (
        1000,
        49 * 3 * 128 + chain(128, *[128] * 3, *[256] * 5, *[512] * 7, 1024) + 1024 * 1000,
        128 + 3 * 128 + 5 * 256 + 7 * 512 + 1024,
        0,
    ),
}


def parameters(name: str, **given: object) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in create_model(name, **given).parameters())


# The channels of decoupled layers without normalization.
BARE_LAYERS = {"cnn9-bare": 512, "cnn9-small-bare": 256}


@pytest.mark.parametrize("name", TABLE)
def test_parameters_are_those_of_the_table(name: str) -> None:
    classes, weights, normalized, shortcuts = TABLE[name]
    given = {"operator": "conv", "num_classes": classes, "activation": "relu"}
    assert parameters(name, **given, norm="none") == weights
    assert parameters(name, **given) == weights + 2 * (normalized + shortcuts)
    # A learned radius for every channel of every decoupled layer; shortcuts and classifier are not decoupled.
    radii = normalized + BARE_LAYERS.get(name, 0)
    assert parameters(name, **{**given, "operator": "tanh-cos"}) == weights + 2 * (normalized + shortcuts) + radii


def test_known_totals() -> None:
    assert parameters("resnet18", operator="conv", num_classes=1000) == 11_689_512
    # A slope per channel of the root, of the leading convolutions, and of the first convolution of each unit.
    slopes = 128 + (128 + 128) + (256 + 2 * 256) + (512 + 3 * 512) + 1024
    modified = {"operator": "conv", "num_classes": 1000}
    relu = parameters("resnet18-modified", **modified, activation="relu")
    assert parameters("resnet18-modified", **modified) == relu + slopes


def test_the_number_of_layers_matches_the_name() -> None:
    for name, count in {"resnet32": 32, "resnet18": 18, "resnet18-modified": 18}.items():
        model = small(name)
        layers = [key for key, part in model.named_modules() if isinstance(part, nn.Conv2d | nn.Linear)]
        assert len([key for key in layers if "shortcut" not in key]) == count
    assert sum(isinstance(part, nn.Conv2d) for part in small("cnn9").modules()) == 9


@pytest.mark.parametrize(
    ("name", "size", "stages"),
    [
        ("cnn9", 32, [16, 8, 4]),
        ("cnn9-small", 32, [16, 8, 4]),
        ("resnet32", 32, [32, 32, 16, 8]),
        ("resnet18", 224, [56, 56, 28, 14, 7]),
        ("resnet18-modified", 224, [56, 28, 14, 7, 4]),
    ],
)
def test_feature_maps_halve_per_stage_as_in_the_table(name: str, size: int, stages: list[int]) -> None:
    found = stage_outputs(small(name, image_size=size).eval(), images(1, size))
    assert [tuple(shape[2:]) for shape in found] == [(side, side) for side in stages]


@pytest.mark.parametrize(
    ("name", "stages", "features"),
    [
        ("cnn9", [64, 128, 256], 512),
        ("cnn9-small", [32, 64, 128], 256),
        ("resnet32", [96, 96, 192, 384], 384),
        ("resnet18", [64, 64, 128, 256, 512], 512),
        ("resnet18-modified", [128, 128, 256, 512, 1024], 1024),
    ],
)
def test_channels_follow_the_width(name: str, stages: list[int], features: int) -> None:
    for width in (1.0, 1.5, 0.001):
        with torch.device("meta"):
            model = create_model(name, "conv", width=width).eval()
            found = stage_outputs(model, torch.zeros(1, 3, 32, 32))
        assert [shape[1] for shape in found] == [max(1, round(width * channels)) for channels in stages]
        assert model.num_features == max(1, round(width * features))


def test_only_the_fully_connected_layer_is_bare() -> None:
    model, usual = small("cnn9-bare"), small("cnn9")
    removed = {key for key, part in usual.named_modules() if type(part) is not type(model.get_submodule(key))}
    assert removed == {"body.dense.norm", "body.dense.activation"}


def test_the_initial_variance_of_weights() -> None:
    torch.manual_seed(0)
    for given, expected in ({}, 2.0), ({"init_variance": 1.0}, 1.0), ({"init_variance": 0.25}, 0.25):
        model = create_model("resnet32", "conv", width=0.3, **given)
        layers = [part for part in model.modules() if isinstance(part, nn.Conv2d | nn.Linear)]
        values = torch.cat([(part.weight * part.weight[0].numel() ** 0.5).flatten() for part in layers])
        assert values.var().item() == pytest.approx(expected, rel=0.02)
    with pytest.raises(ValueError, match="init_variance must be positive, not 0"):
        create_model("cnn9", init_variance=0.0)


CHOICES = [
    {"operator": "conv"},
    {"operator": "tanh-cos"},
    {"operator": Operator("seg", "sqcos", "linear")},
    {"operator": "conv", "norm": "none"},
    {"operator": "tanh-cos", "norm": "none"},
    {"activation": "none"},
    {"activation": "relu"},
    {"activation": "prelu"},
    {"activation": "gelu"},
    {"operator": "conv", "classifier": "normalized"},
    {"norm": "none", "activation": "none", "classifier": "normalized"},
]


@pytest.mark.parametrize("given", CHOICES, ids=lambda given: "-".join(str(value) for value in given.values()))
@pytest.mark.parametrize("name", NAMES)
def test_every_choice_trains(name: str, given: dict[str, object]) -> None:
    model = small(name, **given)
    logits = model(images())
    assert logits.shape == (4, CLASSES)
    nn.functional.cross_entropy(logits, torch.arange(4)).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
    assert model.eval()(images()).isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_zero_classes_return_features(name: str) -> None:
    model, classified = small(name, num_classes=0).eval(), small(name).eval()
    features = model(images())
    assert features.shape == (4, model.num_features)
    torch.testing.assert_close(features, classified.features(images()))
    torch.testing.assert_close(classified(images()), classified.classifier(features))


@pytest.mark.parametrize("name", NAMES)
def test_images_of_other_sizes_and_channels(name: str) -> None:
    for size in (16, 28, 40):
        assert small(name, in_channels=1, image_size=size)(images(2, size, 1)).shape == (2, CLASSES)


@pytest.mark.parametrize("name", NAMES)
def test_only_shortcuts_and_classifier_stay_plain(name: str) -> None:
    layers = {key: part for key, part in small(name).named_modules() if isinstance(part, nn.Conv2d | nn.Linear)}
    plain = {key for key, part in layers.items() if not isinstance(part, Decoupled)}
    assert plain == {key for key in layers if key.endswith("shortcut.conv") or key == "classifier"}
    assert all(type(layers[key]) in (nn.Conv2d, nn.Linear) for key in plain)
    assert not any(isinstance(part, Decoupled) for part in small(name, operator="conv").modules())
    assert all(layer.bias is None for key, layer in layers.items() if key != "classifier")


@pytest.mark.parametrize("name", ["resnet32", "resnet18"])
def test_shortcuts_are_identities_where_shapes_agree(name: str) -> None:
    shortcuts = {key: part for key, part in small(name).named_modules() if key.endswith("shortcut")}
    projected = {key for key, part in shortcuts.items() if not isinstance(part, nn.Identity)}
    assert projected == {key for key in shortcuts if "unit1" in key and "conv1" not in key}
    for key in projected:
        layer = shortcuts[key]
        assert layer.conv.kernel_size == (1, 1)
        assert layer.conv.stride == (2, 2)
        assert isinstance(layer.norm, nn.BatchNorm2d)


def test_activations_after_root_and_addition() -> None:
    own = {"resnet32": (None, nn.ReLU), "resnet18": (nn.ReLU, nn.ReLU), "resnet18-modified": (nn.PReLU, nn.Identity)}
    for name, (root, addition) in own.items():
        body = small(name).body
        assert type(getattr(body.conv0, "activation", None)) is (root or type(None))
        assert type(body.conv1.unit1.activation) is addition
        assert not hasattr(body.conv1.unit1.second, "activation")


def test_a_unit_computes_its_equation() -> None:
    unit = small("resnet32", operator="conv").eval().body.conv2.unit1
    x = torch.randn(2, unit.first.conv.in_channels, 8, 8)
    first = unit.first.norm(unit.first.conv(x)).relu()
    expected = (unit.second.norm(unit.second.conv(first)) + unit.shortcut.norm(unit.shortcut.conv(x))).relu()
    torch.testing.assert_close(unit(x), expected)


@pytest.mark.parametrize("name", NAMES)
def test_plain_and_decoupled_networks_start_with_the_same_weights(name: str) -> None:
    plain, decoupled = small(name, operator="conv").state_dict(), small(name).state_dict()
    assert set(plain) < set(decoupled)
    assert all(torch.equal(plain[key], decoupled[key]) for key in plain)
    assert {key.rsplit(".", 1)[1] for key in set(decoupled) - set(plain)} == {
        "radius",
        "mean_norm",
        "num_batches_tracked",
    }


def test_initial_weights_follow_the_authors() -> None:
    torch.manual_seed(0)
    cifar = create_model("resnet32", "conv", width=0.5)
    for layer in (cifar.body.conv1.unit1.first.conv, cifar.body.conv3.unit1.shortcut.conv, cifar.classifier):
        assert layer.weight.std().item() == pytest.approx(math.sqrt(2 / layer.weight[0].numel()), rel=0.05)
    imagenet = create_model("resnet18-modified", "conv", width=0.5)
    assert imagenet.body.conv2.unit1.second.conv.weight.std().item() == pytest.approx(0.01, rel=0.05)
    lead = imagenet.body.conv2.lead.conv.weight
    assert lead.abs().max() <= math.sqrt(6 / (9 * (lead.shape[0] + lead.shape[1])))
    assert lead.std().item() == pytest.approx(math.sqrt(2 / (9 * (lead.shape[0] + lead.shape[1]))), rel=0.05)
    assert not imagenet.body.conv0.activation.weight.any()
    assert not create_model("cnn9", "conv", width=0.1).classifier.bias.any()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "vit-tiny-normalized"])
def test_constants_of_batch_normalization(name: str) -> None:
    def found(**given: float) -> set[tuple[float, float | None]]:
        kinds = (nn.BatchNorm1d, nn.BatchNorm2d)
        model = small(name, norm="batch", **given)
        return {(part.eps, part.momentum) for part in model.modules() if isinstance(part, kinds)}

    assert found() == {(1e-3, 0.1)}
    assert found(norm_eps=1e-5, norm_momentum=1e-3) == {(1e-5, 1e-3)}


@pytest.mark.parametrize(
    ("channels", "groups"), [(96, 16), (64, 16), (128, 32), (384, 32), (32, 8), (26, 2), (10, 2), (7, 1), (1, 1)]
)
def test_groups_divide_the_channels(channels: int, groups: int) -> None:
    assert group_count(channels) == groups


@pytest.mark.parametrize("name", ["cnn9", "resnet32", "sphereface20"])
def test_group_normalization_does_not_depend_on_the_batch(name: str) -> None:
    """An image has the same logits alone and in a batch, in training mode, too."""
    model = small(name, operator="linear-cos", norm="group").train()
    assert any(isinstance(part, nn.GroupNorm) for part in model.modules())
    assert not any(isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d) for part in model.modules())
    x = images()
    torch.testing.assert_close(model(x[:1]), model(x)[:1], rtol=1e-3, atol=1e-4)
    conv = next(part for part in model.modules() if isinstance(part, nn.GroupNorm))
    rows = torch.randn(3, conv.num_channels, 2, 2)
    grouped = conv(rows).reshape(3, conv.num_groups, -1)
    torch.testing.assert_close(grouped.mean(-1), torch.zeros(3, conv.num_groups), rtol=0, atol=1e-4)


def test_normalized_classifier_gives_norm_times_cosine() -> None:
    model = small("cnn9", classifier="normalized").double().eval()
    assert isinstance(model.classifier, DecoupledLinear)
    assert model.classifier.bias is None
    x = images().double()
    features, weight = model.features(x), model.classifier.weight
    cosine = nn.functional.cosine_similarity(features[:, None], weight[None], dim=-1)
    torch.testing.assert_close(model(x), features.norm(dim=1, keepdim=True) * cosine, rtol=1e-3, atol=1e-4)
    before = model(x)
    with torch.no_grad():
        weight[2] *= 5
    torch.testing.assert_close(model(x), before, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_copies_equal_the_model(name: str) -> None:
    model = small(name)
    model(images())
    model.eval()
    expected = model(images())
    loaded = create_model(name, **SMALL).eval()
    stored = io.BytesIO()
    torch.save(model.state_dict(), stored)
    stored.seek(0)
    loaded.load_state_dict(torch.load(stored))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert torch.equal(other(images()), expected)


def test_state_dict_names_follow_the_structure() -> None:
    expected = {
        "cnn9": ["body.conv2.layer3.conv.weight", "body.conv1.layer1.norm.bias", "body.dense.linear.radius"],
        "resnet32": ["body.conv0.conv.weight", "body.conv1.unit5.second.conv.radius", "classifier.weight"],
        "resnet18": ["body.conv2.unit1.shortcut.conv.weight", "classifier.bias"],
        "resnet18-modified": ["body.conv4.lead.conv.weight", "body.conv1.unit1.first.activation.weight"],
    }
    for name, keys in expected.items():
        assert set(keys) <= set(small(name).state_dict())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"name": "cnn8"}, "unknown network 'cnn8': known are cnn9, .*; did you mean 'cnn9'"),
        ({"name": "nobody:resnet50"}, "unknown network 'nobody:resnet50'"),
        ({"norm": "instance"}, "unknown norm 'instance': known are batch, group, layer, rms, none"),
        ({"norm": "layer"}, "norm='layer' needs a transformer, such as vit-tiny: use norm='batch', 'group' or 'none'"),
        ({"name": "vit-tiny", "norm": "group"}, "norm='group' needs a convolutional network"),
        ({"name": "sphereface20", "norm": "rms"}, "norm='rms' needs a transformer"),
        ({"activation": "rely"}, "unknown activation 'rely'.*did you mean 'relu'"),
        ({"activation": False}, "unknown activation False"),
        ({"classifier": "cosine", "num_classes": 0}, "unknown classifier 'cosine': known are linear, normalized"),
        ({"width": 0}, "width must be positive, not 0"),
        ({"width": -0.5}, "width must be positive, not -0.5"),
        ({"num_classes": -1}, "num_classes must be a whole number, 0 or more, not -1"),
        ({"in_channels": 0}, "in_channels must be a whole number, 1 or more, not 0"),
        ({"image_size": 7}, "image_size must be 8 or more, not 7"),
        ({"norm_eps": 0.0}, "norm_eps must be positive, not 0.0"),
        ({"norm_momentum": 1.5}, r"norm_momentum must be in \(0, 1\], not 1.5"),
        ({"operator": "tahn-cos"}, "unknown magnitude 'tahn'"),
    ],
)
def test_invalid_settings_are_rejected(given: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        create_model(**{"name": "cnn9", **given})


def test_counts_are_whole_numbers() -> None:
    with pytest.raises(ValueError, match=r"num_classes must be a whole number, 0 or more, not 10\.0"):
        create_model("cnn9", num_classes=10.0)


def test_images_that_do_not_fit_are_rejected() -> None:
    with pytest.raises(ValueError, match="image_size=32 does not fit these images, which have 8 x 8 pixels"):
        small("cnn9")(images(2, 64))
    with pytest.raises(ValueError, match=r"input of shape \[3, 32, 32\] must be a batch of images"):
        small("resnet32")(images()[0])


def test_networks_and_prefixes_can_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(prefixes, "own", lambda rest, **given: small(rest, operator=given["operator"]))
    assert not any(isinstance(part, Decoupled) for part in create_model("own:cnn9", "conv").modules())
    with pytest.raises(ValueError, match=r"known are .*own:<name>"):
        create_model("own:")
    with pytest.raises(ValueError, match="'own' is taken"):
        register_prefix("own")(small)
    with pytest.raises(ValueError, match="'cnn9' is taken"):
        register("cnn9")(networks["resnet32"].build)


def test_networks_can_be_created_under_a_debugger():
    """A trace function updates the dictionary of locals(), so that nothing may iterate over it."""

    def trace(frame, event, argument):
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        model = small("cnn9", operator="tanh-cos")
    finally:
        sys.settrace(before)
    assert model(images()).shape == (4, CLASSES)
