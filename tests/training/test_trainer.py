"""Runs: what they leave behind, and that interruptions change nothing."""

import json

import pytest
import torch
from small_runs import ON_CPU, InterruptsAt, Remembers, tiny, train
from torch import nn
from torch._dynamo.utils import counters

import dcnet
from dcnet.models.normalized import Normalized
from dcnet.training import DivergenceError, Execution, Run, Trainer, Watcher, find_run, load_model, read_record, recipe
from dcnet.training.build import build_model, start_from_
from dcnet.training.checkpoints import read_tensors
from dcnet.training.records import CURVES


def weights(run):
    return run.model_file.read_bytes()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return train(tiny(), tmp_path_factory.mktemp("runs"))


def test_a_record_says_it_all(finished):
    run, record = finished
    assert record == run.record() == read_record(run.folder)
    assert run.folder.name == f"digits-cnn9-small-tanh-cos-seed0-{tiny().hash}"
    assert (record["status"], record["steps"], record["steps_done"], record["steps_per_epoch"]) == ("done", 6, 6, 3)
    assert record["config"] == tiny().described()
    assert record["data"]["classes"] == [str(digit) for digit in range(10)]
    assert (record["data"]["train_images"], record["data"]["test_images"]) == (60, 1197)
    assert set(record["curves"]) == set(CURVES)
    assert record["curves"]["step"] == [3, 6]
    assert record["curves"]["epoch"] == [1, 2]
    assert record["results"]["test_accuracy"] == record["curves"]["test_accuracy"][-1]
    assert record["results"]["test_error"] == pytest.approx(100 - record["results"]["test_accuracy"])
    assert record["environment"]["torch"] == torch.__version__
    assert record["timings"]["total"] > 0
    assert not (run.folder / "checkpoints").exists()


def test_the_trained_network_comes_back(finished):
    run, record = finished
    model, found = load_model(run)
    assert found == record
    assert not model.training
    from dcnet.data import load_dataset

    test = load_dataset("digits").test
    with torch.no_grad():
        right = (model(test.images.float() / 255).argmax(1) == test.labels).float().mean().item()
    assert 100 * right == pytest.approx(record["results"]["test_accuracy"], abs=1e-4)


def test_the_same_config_gives_the_same_bits(finished, tmp_path):
    again, record = train(tiny(), tmp_path)
    assert weights(again) == weights(finished[0])
    assert record["curves"]["train_loss"] == finished[1]["curves"]["train_loss"]
    other, _ = train(tiny(seed=1), tmp_path)
    assert weights(other) != weights(again)


@pytest.mark.parametrize("step", [1, 3, 4, 5])
def test_an_interrupted_run_goes_on_to_the_same_bits(finished, tmp_path, step):
    run, record = train(tiny(), tmp_path, watcher=InterruptsAt(step))
    assert (record["status"], record["steps_done"], record["results"]) == ("interrupted", step, record["results"])
    assert run.record()["results"] is None
    assert not run.model_file.exists()
    run, record = train(tiny(), tmp_path)
    assert record["status"] == "done"
    assert record["resumed_at"] == [step]
    assert weights(run) == weights(finished[0])
    same = ("step", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "learning_rate")
    assert all(record["curves"][name] == finished[1]["curves"][name] for name in same)


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "sgd", "lr": 0.05},
        {"optimizer": "adamw", "weight_decay": 0.01},
        {"projection_every": 2, "orthonormal": 1e-3},
        {"weighted_gradients": "update"},
        {"operator": "conv", "label_smoothing": 0.1, "log_floor": 1e-4},
    ],
)
def test_all_that_a_run_remembers_is_in_its_checkpoint(tmp_path, changes):
    config = tiny(**changes)
    whole, _ = train(config, tmp_path / "whole")
    train(config, tmp_path / "parts", watcher=InterruptsAt(2))
    train(config, tmp_path / "parts", watcher=InterruptsAt(5))
    parts, record = train(config, tmp_path / "parts")
    assert record["resumed_at"] == [2, 5]
    assert weights(parts) == weights(whole)


class Noisy(nn.Module):
    """A network with chance in it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, 10))

    def forward(self, input):
        return self.layers(input)


def test_a_network_of_ones_own_with_dropout(tmp_path):
    config = tiny(operator="conv")
    whole, record = train(config, tmp_path / "whole", model=Noisy())
    assert record["parameters"] == 64 * 16 + 16 + 160 + 10
    train(config, tmp_path / "parts", watcher=InterruptsAt(4), model=Noisy())
    parts, _ = train(config, tmp_path / "parts", model=Noisy())
    assert weights(parts) == weights(whole)


def test_a_damaged_checkpoint_is_told_and_the_one_before_is_used(finished, tmp_path):
    every = Execution(device="cpu", checkpoint_every=1)
    run, _ = train(tiny(), tmp_path, every, InterruptsAt(4))
    newest = run.checkpoints.files()[-1]
    newest.write_bytes(newest.read_bytes()[:-100])
    watcher = Remembers()
    run, record = train(tiny(), tmp_path, every, watcher)
    assert record["resumed_at"] == [3]
    assert any(newest.name in note and "the one before it is used" in note for note in watcher.notes)
    assert weights(run) == weights(finished[0])


def test_checkpoints_of_another_config_are_refused(tmp_path):
    run, _ = train(tiny(), tmp_path, watcher=InterruptsAt(2))
    with pytest.raises(ValueError, match="of another config"):
        Trainer(tiny(lr=0.5), run, ON_CPU)


# --- what is trained ---


def test_training_learns(tmp_path):
    _, record = train(tiny(epochs=12, width=0.5, train_images=300), tmp_path)
    assert record["results"]["test_accuracy"] > 85
    assert record["curves"]["train_loss"][-1] < 0.2


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


def test_the_learning_rate_follows_the_schedule(tmp_path):
    from dcnet.training.schedules import Steps

    _, record = train(tiny(epochs=4, schedule=Steps((6,))), tmp_path)
    assert record["curves"]["learning_rate"] == pytest.approx([3e-3, 3e-3, 3e-4, 3e-4])


def test_evaluations_by_steps(tmp_path):
    _, record = train(tiny(steps=5, evaluate_every=2), tmp_path)
    assert record["curves"]["step"] == [2, 4, 5]


def test_a_start_from_a_plain_network(finished, tmp_path):
    plain, _ = train(tiny(operator="conv"), tmp_path)
    model = build_model(tiny(), 10, 1, 8)
    missing = start_from_(model, str(plain.folder))
    assert missing
    assert all(name.endswith(("radius", "mean_norm")) for name in missing)
    trained, _ = read_tensors(plain.model_file)
    own = model.state_dict()
    assert all(torch.equal(own[name.removeprefix("model.")], value) for name, value in trained.items())
    _, record = train(tiny(pretrained=str(plain.folder)), tmp_path)
    assert record["curves"]["train_loss"][0] < finished[1]["curves"]["train_loss"][0]
    with pytest.raises(
        ValueError, match=r"nothing that fits the filters 'network.body.conv1.layer1.conv.weight' of the network, and 9"
    ):
        start_from_(build_model(tiny(width=0.3), 10, 1, 8), str(plain.folder))
    with pytest.raises(ValueError, match="no weights at"):
        start_from_(model, str(tmp_path / "nowhere"))


def test_pixels_are_normalised_inside_the_network():
    model = Normalized(nn.Identity(), (0.5,), (0.25,))
    assert model(torch.tensor([[[[0.0, 0.5, 1.0]]]])).flatten().tolist() == [-2, 0, 2]


# --- what goes wrong ---


class Explodes(nn.Module):
    """The output of one of its layers is infinite from some step on."""

    def __init__(self, after):
        super().__init__()
        self.first, self.second = nn.Linear(64, 10), nn.Linear(10, 10)
        self.after, self.calls = after, 0

    def forward(self, input):
        self.calls += self.training
        hidden = self.first(input.flatten(1))
        return self.second(hidden * (1e38 * 1e38 if self.calls > self.after else 1))


def test_a_loss_that_is_not_finite_stops_and_is_explained(tmp_path):
    run = Run.of(tiny(operator="conv"), tmp_path)
    trainer = Trainer(tiny(operator="conv"), run, Execution(device="cpu", checkpoint_every=2), model=Explodes(4))
    with pytest.raises(DivergenceError, match=r"the loss or a gradient of step 5 is not finite.*layer 'second'.*--lr"):
        trainer.run()
    assert run.record()["status"] == "diverged"
    assert run.checkpoints.newest()[0].step == 4
    assert all(value.isfinite().all() for value in trainer.space.model.state_dict().values())


class SteepAtZero(torch.autograd.Function):
    """Gives what it gets, and a gradient that is not a number."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("nan")


def test_a_gradient_that_is_not_finite_does_not_reach_the_weights(tmp_path):
    class Steep(Explodes):
        def forward(self, input):
            self.calls += self.training
            hidden = self.first(input.flatten(1))
            return self.second(SteepAtZero.apply(hidden) if self.calls > self.after else hidden)

    run = Run.of(tiny(operator="conv"), tmp_path)
    trainer = Trainer(tiny(operator="conv"), run, Execution(device="cpu", checkpoint_every=1), model=Steep(3))
    with pytest.raises(DivergenceError, match=r"gradient of step 4 is not finite: the gradient of 'first.weight'"):
        trainer.run()
    assert run.checkpoints.newest()[0].step == 3
    assert all(value.isfinite().all() for value in trainer.space.model.state_dict().values())


def test_weights_that_are_not_finite_are_named(tmp_path):
    model = Explodes(100)
    with torch.no_grad():
        model.first.weight[0, 0] = float("nan")
    with pytest.raises(DivergenceError, match=r"step 1 is not finite: the parameter 'first.weight'"):
        train(tiny(operator="conv"), tmp_path, model=model)


def test_a_folder_that_cannot_be_written_is_noticed_before_training(tmp_path):
    (tmp_path / "file").write_text("")

    class NeverCalled(Watcher):
        def starts(self, name, done, total):
            raise AssertionError("training began")

    with pytest.raises(OSError, match="file"):
        train(tiny(), tmp_path / "file", watcher=NeverCalled())


def test_batches_larger_than_the_dataset(tmp_path):
    with pytest.raises(ValueError, match="from 1 to 60 images"):
        train(tiny(batch_size=61), tmp_path)


@pytest.mark.parametrize("content", ["", "[]", '{"config": 1}', "{"])
def test_files_that_are_no_records(tmp_path, content):
    (tmp_path / "record.json").write_text(content)
    with pytest.raises(ValueError, match="is not a record of a run"):
        read_record(tmp_path)


def test_runs_are_found_by_name(finished, tmp_path):
    run, _ = finished
    root = run.folder.parent
    for text in (str(run.folder), str(run.record_file), run.folder.name, "digits-cnn9", run.folder.name[-8:]):
        assert find_run(text, root) == run
    train(tiny(seed=3), root)
    with pytest.raises(ValueError, match="may be any of 2 runs"):
        find_run("digits", root)
    with pytest.raises(ValueError, match="no run 'nothing'"):
        find_run("nothing", root)
    with pytest.raises(ValueError, match="no record at"):
        read_record(tmp_path)


def test_weights_of_another_network_are_refused(finished, tmp_path):
    run, _ = finished
    changed = json.loads(run.record_file.read_text())
    changed["config"]["width"] = 0.2
    other = Run(tmp_path / "other")
    other.write(changed)
    other.model_file.write_bytes(weights(run))
    with pytest.raises(ValueError, match=r"in this network and .* in the file"):
        load_model(other)
    changed["config"] |= {"width": 0.1, "operator": "conv"}
    other.write(changed)
    with pytest.raises(ValueError, match="of another network"):
        load_model(other)


# --- around it ---


def test_a_tracker_gets_the_curves(tmp_path):
    run, _ = train(tiny(), tmp_path, Execution(device="cpu", tracker="tensorboard"))
    assert list((run.folder / "dcnet").rglob("events.out.tfevents.*"))


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_network_trains_alike(tmp_path):
    config = tiny(operator="conv")
    torch.compiler.reset()
    curves = []
    for compiled in (False, True):
        model = Noisy()
        model.layers[2].p = 0.0
        _, record = train(config, tmp_path / str(compiled), Execution(device="cpu", compile=compiled), model=model)
        assert record["execution"]["compile"] == compiled
        curves.append(record["curves"]["train_loss"])
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_a_constraint_is_compiled_with_the_network(tmp_path):
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
    assert graphs == [0, 2], "one of the network and one of the constraint, and not one in each step"


def test_a_folder_of_images(tmp_path):
    """As ImageNet lies on the disk; the smallest network on the smallest crops."""
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
    assert record["data"]["classes"] == ["cat", "dog"]
    assert (record["data"]["train_images"], record["data"]["test_images"]) == (12, 6)
    assert record["steps_per_epoch"] == 3
    train(config, tmp_path / "parts", execution, InterruptsAt(4))
    parts, _ = train(config, tmp_path / "parts", execution)
    assert weights(parts) == weights(whole)


@pytest.mark.parametrize("annealing", [None, "auto"])
def test_a_head_with_a_margin(tmp_path, annealing):
    """What it has let in of its margin is kept as well."""
    config = tiny(margin="a-softmax(m=2)", annealing=annealing, features=3, label_smoothing=0.01)
    whole, record = train(config, tmp_path / "whole")
    assert record["status"] == "done"
    train(config, tmp_path / "parts", watcher=InterruptsAt(4))
    parts, _ = train(config, tmp_path / "parts")
    assert weights(parts) == weights(whole)
    model, _ = load_model(whole)
    x = torch.rand(5, 1, 8, 8)
    assert model.features(x).shape == (5, 3)
    assert model(x).shape == (5, 10)
    assert model.network.head.step.item() == 6


def test_a_head_learns(tmp_path):
    _, record = train(tiny(epochs=12, width=0.5, train_images=300, margin="am-softmax", operator="conv"), tmp_path)
    assert record["results"]["test_accuracy"] > 85
