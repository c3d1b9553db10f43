"""Networks with sharded heads from a config, and weights of other runs."""

import pytest
import torch
from helpers.small_runs import InterruptsAt, Noisy, tiny, train

from dcnet.losses import MarginSoftmax, ShardedMarginSoftmax
from dcnet.training import Execution, Run, Trainer, load_model
from dcnet.training.build import build_model, load_run_weights_, operator_of_statistics, shards_head
from dcnet.training.state import MODEL
from dcnet.training.tensor_files import read_tensors, write_tensors


@pytest.mark.parametrize(
    ("changes", "asked", "processes", "expected"),
    [
        ({}, None, 4, False),
        ({"margin": "arcface"}, None, 4, False),
        ({"margin": "arcface"}, True, 4, True),
        ({"margin": "arcface"}, True, 1, False),
        ({"margin": "sphereface2"}, True, 4, True),
        ({"margin": "arcface", "sample_classes": 0.5}, None, 4, True),
        ({"margin": "arcface", "sample_classes": 0.5}, None, 1, True),
        # With one process nothing is divided.
        ({"margin": "arcface", "label_smoothing": 0.1, "adversary": "fgsm"}, True, 1, False),
    ],
)
def test_a_head_is_sharded_on_request_and_if_its_classes_are_sampled(changes, asked, processes, expected):
    assert shards_head(tiny(**changes), asked, processes, fsdp=False) is expected


@pytest.mark.parametrize(
    ("changes", "asked", "message"),
    [
        ({}, True, "shard_head=True needs a head with a margin: give a margin, such as a-softmax"),
        ({"margin": "arcface", "label_smoothing": 0.1}, True, "shard_head=True does not support label_smoothing=0.1: "),
        ({"margin": "arcface", "adversary": "fgsm"}, True, "shard_head=True does not support adversary='fgsm': omit"),
        (
            {"margin": "arcface", "adversary": "fgsm", "sample_classes": 0.5},
            None,
            "sample_classes=0.5 on 2 processes does not support adversary='fgsm': omit one of them",
        ),
        (
            {"margin": "arcface", "sample_classes": 0.5},
            False,
            "sample_classes=0.5 on 2 processes needs a sharded head, not shard_head=False: omit it",
        ),
    ],
)
def test_what_shards_do_not_support_is_an_error(changes, asked, message):
    with pytest.raises(ValueError, match=message):
        shards_head(tiny(**changes), asked, 2, fsdp=False)


def test_only_training_samples_classes():
    config = tiny(margin="arcface", sample_classes=0.5)
    trained, loaded = (build_model(config, 10, 1, 8, sharded).network.head for sharded in (True, False))
    assert isinstance(trained, ShardedMarginSoftmax)
    assert trained.sample == 0.5
    assert type(loaded) is MarginSoftmax


def test_one_process_samples_classes(tmp_path):
    """The loss over fewer classes is smaller; the loaded network predicts all of them."""
    found = {}
    for sample in (None, 0.2):
        run, record = train(tiny(margin="normface", sample_classes=sample), tmp_path)
        found[sample] = record.curves.train_loss[0]
        model, _ = load_model(run)
        assert type(model.network.head) is MarginSoftmax
    assert 0 < found[0.2] < found[None]


@pytest.mark.parametrize(
    ("execution", "changes"), [({"shard_head": True}, {}), ({}, {"margin": "arcface", "sample_classes": 0.5})]
)
def test_custom_networks_have_their_own_head(tmp_path, execution, changes):
    with pytest.raises(ValueError, match="does not apply to a custom network, which has its own head: omit it"):
        train(tiny(**changes), tmp_path, Execution(device="cpu", **execution), model=Noisy())


def weights_file(path, **changes):
    """The weights of a new network of 10 classes, as in the folder of a run."""
    config = tiny(**changes)
    tensors = {MODEL + name: value for name, value in build_model(config, 10, 1, 8).state_dict().items()}
    write_tensors(path, tensors, {"config": config.described()})
    return str(path)


def test_only_the_head_may_have_another_number_of_classes(tmp_path):
    """The embedding, which comes after the head in the order of parameters, is a part of the network."""
    for name, changes in {"embedding": {"margin": "arcface", "features": 2}, "head": {"margin": "arcface"}}.items():
        file = weights_file(tmp_path / f"{name}.safetensors", **changes)
        model = build_model(tiny(**changes), 7, 1, 8)
        assert load_run_weights_(model, file) == ["network.head.weight"]
        tensors, _ = read_tensors(tmp_path / f"{name}.safetensors")
        own = {MODEL + name: value for name, value in model.state_dict().items() if name != "network.head.weight"}
        assert all(torch.equal(value, tensors[name]) for name, value in own.items())


def test_weights_without_the_embedding_are_rejected(tmp_path):
    file = weights_file(tmp_path / "plain.safetensors", margin="arcface")
    width = build_model(tiny(margin="arcface"), 10, 1, 8).network.num_features
    model = build_model(tiny(margin="arcface", features=width), 10, 1, 8)
    with pytest.raises(
        ValueError, match=r"lacks weights of the right shape for 'network.embedding.weight' and 0 other"
    ):
        load_run_weights_(model, file)


def checkpoint_of(root, config):
    """A checkpoint of a run that was interrupted at its second step."""
    run = Run.of(config, root)
    Trainer(config, run, Execution(device="cpu"), InterruptsAt(2)).run()
    return run.checkpoints.files()[-1]


def test_the_statistics_of_a_checkpoint_are_those_of_its_operator(tmp_path):
    newer = checkpoint_of(tmp_path, tiny())
    assert operator_of_statistics(str(newer)) == "tanh-cos"
    # Checkpoints of older versions lack the config, but lie beside the record.
    tensors, notes = read_tensors(newer)
    notes.pop("config")
    write_tensors(newer, tensors, notes)
    assert operator_of_statistics(str(newer)) == "tanh-cos"
    alone = newer.rename(tmp_path / newer.name)
    assert operator_of_statistics(str(alone)) == "conv"


def test_a_run_from_a_checkpoint_of_the_same_operator_keeps_its_statistics(tmp_path):
    checkpoint = checkpoint_of(tmp_path / "before", tiny())
    config = tiny(pretrained=str(checkpoint))
    model = Trainer(config, Run.of(config, tmp_path), Execution(device="cpu")).setup.model
    tensors, _ = read_tensors(checkpoint)
    for kind in ("num_batches_tracked", "running_var", "mean_norm"):
        found = {MODEL + name: value for name, value in model.state_dict().items() if name.endswith(kind)}
        assert found
        assert all(torch.equal(value, tensors[name]) and value.any() for name, value in found.items())


def test_a_checkpoint_of_an_older_version_resumes_to_the_same_weights(tmp_path):
    weights = []
    for older in (False, True):
        checkpoint = checkpoint_of(tmp_path / str(older), tiny())
        tensors, notes = read_tensors(checkpoint)
        if older:
            notes.pop("config")
            write_tensors(checkpoint, tensors, notes)
        run, record = train(tiny(), tmp_path / str(older))
        assert (record.status, record.resumed_at) == ("done", [2])
        weights.append(run.model_file.read_bytes())
    straight, _ = train(tiny(), tmp_path / "straight")
    assert weights[0] == weights[1] == straight.model_file.read_bytes()
