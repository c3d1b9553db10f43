"""Custom networks: training, names, hashes, loading and resuming."""

import dataclasses

import pytest
import torch
from helpers.small_runs import ON_CPU, InterruptsAt, Noisy, Remembers, tiny, train, weights
from torch import nn

import dcnet
from dcnet.data import load_dataset
from dcnet.experiments.status import RecordIndex
from dcnet.losses import MarginSoftmax
from dcnet.models.blocks import MarginNetwork
from dcnet.training import Run, Trainer, config_of, load_model
from dcnet.training.identity import with_network
from dcnet.training.tensor_files import read_tensors, write_tensors


class Tied(nn.Module):
    """A network with two layers that share their weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Conv2d(channels, 4, 3) for channels in (1, 4, 4))
        self.third.weight = self.second.weight
        self.classes = nn.Linear(16, 10)

    def forward(self, input):
        return self.classes(self.third(self.second(self.first(input)).relu()).flatten(1))


def test_tied_weights_are_stored_under_both_names(tmp_path):
    networks = [dcnet.decouple(Tied(), "tanh-cos") for _ in range(3)]
    whole, record = train(tiny(), tmp_path / "whole", model=networks[0])
    tensors, _ = read_tensors(whole.model_file)
    assert record.status == "done"
    assert torch.equal(tensors["model.second.weight"], networks[0].third.weight)
    assert torch.equal(tensors["model.third.weight"], networks[0].third.weight)
    train(tiny(), tmp_path / "parts", callback=InterruptsAt(4), model=networks[1])
    parts, _ = train(tiny(), tmp_path / "parts", model=networks[2])
    assert weights(parts) == weights(whole)


def test_compiled_custom_networks_train_like_plain_ones(tmp_path):
    plain, compiled = Noisy(), Noisy()
    train(tiny(operator="conv"), tmp_path / "plain", model=plain)
    train(tiny(operator="conv"), tmp_path / "compiled", model=torch.compile(compiled, backend="eager"))
    for ours, theirs in zip(compiled.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_a_margin_requires_a_custom_network_with_a_head(tmp_path):
    config = tiny(margin="arcface")
    with pytest.raises(ValueError, match=r"margin='arcface' needs a network .* which Noisy does not: omit margin"):
        train(config, tmp_path, model=Noisy())
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, not 'resnet18'"):
        train(config, tmp_path, model="resnet18")
    assert not list(tmp_path.iterdir())
    body = dcnet.create_model("cnn9-small", num_classes=0, width=0.1, in_channels=1, image_size=8)
    _, record = train(config, tmp_path, model=MarginNetwork(body, MarginSoftmax(body.num_features, 10, "arcface")))
    assert record.status == "done"


# --- names and loading ---


def test_the_record_has_the_name_of_the_custom_network(tmp_path):
    callback = Remembers()
    run, record = train(tiny(), tmp_path, callback=callback, model=Noisy())
    own = Run.of(tiny(), tmp_path, model=Noisy())
    assert own.folder.name == record.run_name
    assert record.name == "digits-Noisy-seed0"
    assert record.network_class == "helpers.small_runs.Noisy"
    # The operator of the config, tanh-cos, is not in the network.
    assert record.config["operator"] == "conv"
    assert record.command is None
    assert any(f"{run.folder} holds the run {own.folder.name}, but has another name" in note for note in callback.notes)
    assert Run.of(tiny(), model=Noisy(), model_name="mine").folder.name.startswith("digits-mine-seed0-")


def test_different_networks_have_different_hashes():
    class Hidden(nn.Sequential):
        def __init__(self, count, operator=None):
            layers = nn.Linear(64, count), nn.ReLU(), nn.Linear(count, 10)
            super().__init__(nn.Flatten(), *layers)
            if operator:
                dcnet.decouple(self, operator, linear=True, inplace=True)

    config = tiny()
    made = [Hidden(4), Hidden(5), Hidden(4, "tanh-cos"), Hidden(4, "ball-cos"), Noisy()]
    found = [with_network(config, model) for model in made]
    assert len({one.hash for one in found} | {config.hash}) == 6
    assert [one.operator for one in found] == ["conv", "conv", "tanh-cos", "ball-cos", "conv"]
    assert with_network(config, Hidden(4)) == found[0]
    assert with_network(config, torch.compile(Hidden(4), backend="eager")) == found[0]


def test_load_model_accepts_a_builder_for_custom_networks(tmp_path):
    model = Noisy()
    run, _ = train(tiny(), tmp_path, model=model)
    needed = r"has a custom network, helpers\.small_runs\.Noisy, which only your code can build: use load_model\(run, "
    with pytest.raises(ValueError, match=needed):
        load_model(run)
    found, record = load_model(run, Noisy)
    assert not found.training
    images = torch.rand(3, 1, 8, 8)
    assert torch.equal(found(images), model.eval()(images))
    assert record.status == "done"
    with pytest.raises(ValueError, match="the weights are of another network"):
        load_model(run, lambda: nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"builder must return an nn\.Module, not 3"):
        load_model(run, lambda: 3)
    wrapped, _ = train(tiny(), tmp_path / "compiled", model=torch.compile(Noisy(), backend="eager"))
    assert isinstance(load_model(wrapped, Noisy)[0], Noisy)


def test_resuming_requires_the_custom_network_and_data(tmp_path):
    run, record = train(tiny(), tmp_path, callback=InterruptsAt(4), model=Noisy(), model_name="mine")
    config = config_of(record.config)
    with pytest.raises(ValueError, match=r"has no weights yet: .*`Trainer\(config, run, model=\.\.\.\)` resumes"):
        load_model(run, Noisy)
    with pytest.raises(ValueError, match="the config has a custom network, 'mine': pass it as model="):
        Trainer(config, run, ON_CPU)
    trainer = Trainer(config, run, ON_CPU, model=Noisy())
    assert (trainer.done, trainer.config) == (4, config)
    with pytest.raises(ValueError, match="the checkpoints of the run belong to another network than Tied"):
        Trainer(tiny(), run, ON_CPU, model=Tied())
    own = dataclasses.replace(load_dataset("digits"), name="own")
    _, record = train(tiny(), tmp_path / "data", dataset=own)
    assert record.name == "own-cnn9-small-tanh-cos-seed0"
    with pytest.raises(ValueError, match="the run has a custom dataset, 'own', which only your code can load"):
        Trainer(config_of(record.config), Run(tmp_path / "new"), ON_CPU)


def test_the_folder_of_another_run_is_not_overwritten(tmp_path):
    run, _ = train(tiny(), tmp_path)
    before = weights(run), run.record_file.read_bytes()
    for again in (False, True):
        with pytest.raises(ValueError, match=r"holds another run, digits-cnn9-small-tanh-cos-seed0"):
            train(tiny(), tmp_path, model=Noisy(), again=again)
    assert (weights(run), run.record_file.read_bytes()) == before
    # `dcnet reproduce` must not use a folder of the config that holds a run of another network.
    own, _ = train(tiny(), tmp_path / "own", model=Noisy())
    assert own.done
    assert RecordIndex(tmp_path / "own").record(tiny()) is None
    assert RecordIndex(tmp_path).record(tiny()) is not None


def test_checkpoints_of_older_versions_without_a_network_resume(tmp_path):
    run, _ = train(tiny(), tmp_path, callback=InterruptsAt(4), model=Noisy())
    (file,) = run.checkpoints.files()
    tensors, notes = read_tensors(file)
    for name in ("network", "fingerprint"):
        del notes[name]
    write_tensors(file, tensors, notes | {"hash": tiny().hash})
    record = run.record()
    for name in ("network", "data"):
        del record.config[name]
    run.write(record)
    assert train(tiny(), tmp_path, model=Noisy())[1].resumed_at == [4]
