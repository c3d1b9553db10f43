"""Training follows its config: optimizer, schedule, constraints, pretrained weights, compilation, margins."""

import math

import pytest
import torch
from helpers.small_runs import InterruptsAt, Noisy, tiny, train, weights
from torch import nn
from torch._dynamo.utils import counters

import dcnet
from dcnet.filter_optimizers import OTHER_RATE
from dcnet.layers import Decoupled
from dcnet.models.blocks import Normalized
from dcnet.robustness.corruptions import corrupt
from dcnet.training import Execution, load_model, recipe
from dcnet.training.build import OPTIMIZERS, build_model, build_optimizer, load_run_weights_
from dcnet.training.config import CHOICES
from dcnet.training.setup import Setup
from dcnet.training.tensor_files import read_tensors


def test_training_learns(tmp_path):
    _, record = train(tiny(epochs=12, width=0.5, train_images=300), tmp_path)
    assert record.results.test_accuracy > 85
    assert record.curves.train_loss[-1] < 0.2


def test_weights_are_projected(tmp_path):
    run, _ = train(tiny(projection_every=6), tmp_path)
    model, _ = load_model(run)
    layers = [module for module in model.modules() if isinstance(module, dcnet.DecoupledConv2d)]
    assert len(layers) == 9
    for layer in layers:
        torch.testing.assert_close(layer.weight.flatten(1).norm(dim=1), torch.ones(len(layer.weight)))


def test_the_constraint_makes_filters_more_orthogonal(tmp_path):
    measured = []
    for coefficient in (0.0, 1.0):
        run, _ = train(tiny(orthonormal=coefficient, epochs=5, lr=0.02), tmp_path)
        with torch.no_grad():
            measured.append(dcnet.regularizers.orthonormal(load_model(run)[0]).item())
    assert measured[1] < 0.7 * measured[0]


@pytest.mark.parametrize("name", ["adam", "muon"])
def test_decay_of_weighted_filters_follows_the_config(name):
    counts = []
    for decays in (True, False):
        config = tiny(operator="tanh-cos+linear", weight_decay=0.02, decay_weighted=decays, optimizer=name)
        model = build_model(config, 10, 1, 8)
        optimizer = build_optimizer(config, model, torch.device("cpu"))
        groups = [group for group in optimizer.param_groups if group["weight_decay"]]
        decaying = {id(value) for group in groups for value in group["params"]}
        counts.append([id(layer.weight) in decaying for layer in model.modules() if isinstance(layer, Decoupled)])
    assert counts == [[True] * 10, [False] * 10]


def test_the_other_rate_reaches_the_optimizer():
    model = build_model(tiny(), 10, 1, 8)
    for name, usual in {"muon": 1.0, "sphere-sgd": OTHER_RATE}.items():
        rates = [
            build_optimizer(tiny(optimizer=name, other_rate=rate), model, torch.device("cpu")).other_rate
            for rate in (None, 0.3)
        ]
        assert rates == [usual, 0.3]


KINDS = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD", "muon": "Muon", "sphere-sgd": "SphereSGD"}


def test_every_optimizer_of_configs_can_be_built():
    assert tuple(KINDS) == tuple(OPTIMIZERS) == CHOICES["optimizer"]


@pytest.mark.parametrize("name", ["muon", "sphere-sgd"])
def test_optimizers_of_filters_need_whole_filters(name):
    config = tiny(optimizer=name)
    with pytest.raises(ValueError, match=f"optimizer='{name}' does not support FSDP"):
        build_optimizer(config, build_model(config, 10, 1, 8), torch.device("cpu"), sharded=True)


@pytest.mark.parametrize(("name", "lr", "changes"), [("muon", 0.01, {"projection_every": 1}), ("sphere-sgd", 0.1, {})])
def test_optimizers_of_filters_learn_with_filters_of_norm_1(tmp_path, name, lr, changes):
    run, record = train(tiny(optimizer=name, lr=lr, epochs=12, width=0.5, train_images=300, **changes), tmp_path)
    assert record.results.test_accuracy > 75
    for layer in load_model(run)[0].modules():
        if isinstance(layer, dcnet.DecoupledConv2d):
            torch.testing.assert_close(layer.weight.flatten(1).norm(dim=1), torch.ones(len(layer.weight)))


def test_a_projection_in_every_step_is_a_part_of_the_step(tmp_path):
    """It gives the same weights as a projection after each step."""
    config = tiny(projection_every=1)
    inside, outside = (Setup(config, tmp_path, Execution(device="cpu")) for _ in range(2))
    assert inside.projection is None
    outside.step.projection, outside.projection = None, dcnet.optim.WeightProjection(outside.model, 1)
    for setup in (inside, outside):
        for step in range(3):
            setup.train_step(step, [])
    torch.testing.assert_close(inside.model.state_dict(), outside.model.state_dict(), rtol=0, atol=0)
    first = next(layer for layer in inside.model.modules() if isinstance(layer, dcnet.DecoupledConv2d))
    torch.testing.assert_close(first.weight.flatten(1).norm(dim=1), torch.ones(len(first.weight)))


@pytest.mark.parametrize(("name", "kind"), [pair for pair in KINDS.items() if pair[0] in ("sgd", "adam", "adamw")])
def test_build_optimizer_follows_the_config(name, kind):
    momentum = {"momentum": 0.3} if name == "sgd" else {}
    config = tiny(optimizer=name, lr=0.07, weight_decay=0.02, **momentum)
    optimizer = build_optimizer(config, build_model(config, 10, 1, 8), torch.device("cpu"))
    assert type(optimizer).__name__ == kind
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.02, 0]
    assert all(group["lr"] == 0.07 for group in optimizer.param_groups)
    assert all(group.get("momentum", 0.3) == 0.3 for group in optimizer.param_groups)


@pytest.mark.parametrize("name", ["muon", "sphere-sgd"])
def test_optimizers_of_filters_follow_the_config(name):
    config = tiny(optimizer=name, lr=0.07, weight_decay=0.02, momentum=0.3)
    optimizer = build_optimizer(config, build_model(config, 10, 1, 8), torch.device("cpu"))
    assert type(optimizer).__name__ == KINDS[name]
    assert {(group["lr"], group["momentum"]) for group in optimizer.param_groups} == {(0.07, 0.3)}
    # The filters are unweighted, so that only other parameters decay.
    assert {group["weight_decay"] for group in optimizer.param_groups if group["filters"]} == {0}
    assert {group["weight_decay"] for group in optimizer.param_groups if not group["filters"]} == {0, 0.02}


def test_the_learning_rate_follows_the_schedule(tmp_path):
    from dcnet.training.schedules import Steps

    _, record = train(tiny(epochs=4, schedule=Steps((6,))), tmp_path)
    assert record.curves.learning_rate == pytest.approx([3e-3, 3e-3, 3e-4, 3e-4])


def test_evaluate_every_counts_steps(tmp_path):
    _, record = train(tiny(steps=5, evaluate_every=2), tmp_path)
    assert record.curves.step == [2, 4, 5]


def test_a_decoupled_network_can_start_from_a_plain_one(tmp_path):
    plain, _ = train(tiny(operator="conv"), tmp_path)
    model = build_model(tiny(), 10, 1, 8)
    missing = load_run_weights_(model, str(plain.folder))
    assert missing
    assert all(name.endswith(("radius", "mean_norm", "num_batches_tracked")) for name in missing)
    trained, _ = read_tensors(plain.model_file)
    own = model.state_dict()
    assert all(torch.equal(own[name.removeprefix("model.")], value) for name, value in trained.items())
    _, record = train(tiny(pretrained=str(plain.folder)), tmp_path)
    _, fresh = train(tiny(), tmp_path)
    assert record.curves.train_loss[0] < fresh.curves.train_loss[0]
    with pytest.raises(
        ValueError, match=r"lacks weights of the right shape for 'network.body.conv1.layer1.conv.weight' and 9 other"
    ):
        load_run_weights_(build_model(tiny(width=0.3), 10, 1, 8), str(plain.folder))
    with pytest.raises(ValueError, match="no weights at"):
        load_run_weights_(model, str(tmp_path / "nowhere"))


def test_pretrained_weights_do_not_change_pixel_normalization(tmp_path):
    """The config of the new run defines its pixel normalization."""
    before, _ = train(tiny(steps=1, pixel_mean=(0.5,), pixel_std=(0.25,)), tmp_path)
    after, _ = train(tiny(steps=1, pretrained=str(before.folder)), tmp_path)
    assert [load_model(run)[0].mean.item() for run in (before, after)] == [0.5, 0.0]
    assert [load_model(run)[0].std.item() for run in (before, after)] == [0.25, 1.0]


def test_pixels_are_normalized_inside_the_network():
    model = Normalized(nn.Identity(), (0.5,), (0.25,))
    assert model(torch.tensor([[[[0.0, 0.5, 1.0]]]])).flatten().tolist() == [-2, 0, 2]


@pytest.mark.parametrize("kind", ["image", "channel", "scale"])
def test_standardized_images_match_plain_loops(kind):
    """Also a flat channel and a flat image, which become zeros in place of a division by zero."""
    torch.manual_seed(0)
    images = torch.rand(4, 3, 5, 6, dtype=torch.float64)
    images[1, 2], images[2] = 0.3, 0.7
    model = build_model(tiny(standardize=kind), 10, 3, 8)
    model.network = nn.Identity()
    found = model(images)
    for image, own in zip(images, found, strict=True):
        for part, result in zip(image, own, strict=True) if kind == "channel" else ((image, own),):
            pixels = part.flatten().tolist()
            mean = 0.0 if kind == "scale" else sum(pixels) / len(pixels)
            variance = sum((value - mean) ** 2 for value in pixels) / len(pixels)
            wanted = [(value - mean) / math.sqrt(variance + 1e-6) for value in pixels]
            assert result.flatten().tolist() == pytest.approx(wanted, abs=1e-9)
    assert found[2].abs().max() < 1e-9 or kind == "scale"


def test_standardized_channels_do_not_see_contrast_and_brightness(tmp_path):
    """A network of a run, loaded again, has the same outputs for all images without clamped pixels."""
    run, _ = train(tiny(standardize="channel", steps=1), tmp_path)
    model = load_model(run)[0].double()
    images = 0.4 + 0.2 * torch.rand(5, 1, 8, 8, dtype=torch.float64)
    changed = corrupt(corrupt(images, "contrast", 3), "brightness", 5)
    assert changed.max() < 1
    torch.testing.assert_close(model(changed), model(images), atol=1e-2, rtol=1e-2)
    assert not torch.allclose(model(images.flip(3)), model(images), atol=1e-2, rtol=1e-2)


def test_a_tracker_writes_the_curves(tmp_path):
    run, _ = train(tiny(), tmp_path, Execution(device="cpu", tracker="tensorboard"))
    assert list((run.folder / "dcnet").rglob("events.out.tfevents.*"))


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_network_has_the_eager_losses(tmp_path):
    config = tiny(operator="conv")
    torch.compiler.reset()
    curves = []
    for compiled in (False, True):
        model = Noisy()
        model.layers[2].p = 0.0
        _, record = train(config, tmp_path / str(compiled), Execution(device="cpu", compile=compiled), model=model)
        assert record.execution["compile"] == compiled
        curves.append(record.curves.train_loss)
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_the_network_is_compiled_once(tmp_path):
    config, found, graphs = tiny(orthonormal=1.0), [], []
    for compiled in (False, True):
        torch.compiler.reset()
        counters.clear()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), dcnet.DecoupledLinear(64, 16), dcnet.DecoupledLinear(16, 10))
        train(config, tmp_path / str(compiled), Execution(device="cpu", compile=compiled), model=model)
        found.append(model.state_dict())
        graphs.append(counters["stats"]["unique_graphs"])
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-5)
    assert graphs == [0, 1], "one for the network, not one per step"


def test_training_on_a_folder_of_images(tmp_path):
    """The layout of ImageNet, with a small network and small crops."""
    import numpy
    from PIL import Image

    chance = numpy.random.default_rng(0)
    for part, count in (("train", 6), ("val", 3)):
        for i, name in enumerate(("cat", "dog")):
            folder = tmp_path / "data" / part / name
            folder.mkdir(parents=True)
            for k in range(count):
                pixels = chance.integers(128 * i, 128 * i + 128, (40, 50, 3), dtype=numpy.uint8)
                Image.fromarray(pixels).save(folder / f"{k}.png")
    small = {"model": "cnn9-small", "width": 0.1, "image_size": 16, "batch_size": 4, "precision": "float32"}
    config = recipe("paper-imagenet", steps=6, evaluate_every=3, lr=0.01, **small)
    execution = Execution(device="cpu", data_dir=tmp_path / "data", workers=0)
    whole, record = train(config, tmp_path / "whole", execution)
    assert record.data.classes == ["cat", "dog"]
    assert (record.data.train_images, record.data.test_images) == (12, 6)
    assert record.steps_per_epoch == 3
    train(config, tmp_path / "parts", execution, InterruptsAt(4))
    parts, _ = train(config, tmp_path / "parts", execution)
    assert weights(parts) == weights(whole)


@pytest.mark.parametrize("annealing", [None, "auto"])
def test_a_margin_head_resumes_to_the_same_bits(tmp_path, annealing):
    """Checkpoints include the progress of the annealing."""
    config = tiny(margin="a-softmax(m=2)", annealing=annealing, features=3, label_smoothing=0.01)
    whole, record = train(config, tmp_path / "whole")
    assert record.status == "done"
    train(config, tmp_path / "parts", callback=InterruptsAt(4))
    parts, _ = train(config, tmp_path / "parts")
    assert weights(parts) == weights(whole)
    model, _ = load_model(whole)
    x = torch.rand(5, 1, 8, 8)
    assert model.features(x).shape == (5, 3)
    assert model(x).shape == (5, 10)
    assert model.network.head.step.item() == 6


@pytest.mark.parametrize("margin", ["adaface", "elastic-arcface", "curricularface"])
def test_the_state_of_a_margin_resumes_to_the_same_bits(tmp_path, margin):
    config = tiny(margin=margin, annealing="auto")
    whole, record = train(config, tmp_path / "whole")
    assert record.status == "done"
    train(config, tmp_path / "parts", callback=InterruptsAt(4))
    parts, _ = train(config, tmp_path / "parts")
    assert weights(parts) == weights(whole)
    head = load_model(whole)[0].network.head
    assert {name: head.get_buffer(name).item() for name in head.state_names} != {
        name: value.item() for name, value in head.margin.first_state().items()
    }


def test_a_run_filters_near_duplicates(tmp_path):
    """Also with a recipe that has label smoothing, which filtering does not support."""
    config = recipe("paper-cifar", margin="arcface", interclass_filtering_threshold=0.3)
    assert config.label_smoothing == 0
    config = tiny(margin="arcface", interclass_filtering_threshold=0.3)
    assert config.hash != tiny(margin="arcface").hash
    run, _ = train(config, tmp_path)
    assert load_model(run)[0].network.head.interclass_filtering_threshold == 0.3


def test_a_margin_head_learns(tmp_path):
    _, record = train(tiny(epochs=12, width=0.5, train_images=300, margin="am-softmax", operator="conv"), tmp_path)
    assert record.results.test_accuracy > 85
