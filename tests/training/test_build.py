"""Networks with sharded heads from a config."""

import pytest
from helpers.small_runs import Noisy, tiny, train

from dcnet.losses import MarginSoftmax, ShardedMarginSoftmax
from dcnet.training import Execution, load_model
from dcnet.training.build import build_model, shards_head


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
