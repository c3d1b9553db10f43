"""Heads whose classes are divided among processes."""

from functools import partial

import pytest
import torch
from helpers import sharded_heads
from helpers.processes import launch

from dcnet.losses import MarginSoftmax, ShardedMarginSoftmax, registry


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def passed(request):
    """The names of the checks that all processes of a group have passed; no number divides 11 classes evenly."""
    printed = launch(request.param, sharded_heads.__file__).stdout
    return [name for name in sharded_heads.CHECKS if printed.count(f"passed: {name}") == request.param]


@pytest.mark.parametrize("name", sharded_heads.CHECKS)
def test_all_processes_together_equal_one_process(passed, name):
    """Loss and gradients in float64 to 1e-8; see `helpers/sharded_heads.py` for each check."""
    assert name in passed


def test_one_process_raises_for_the_first_invalid_label():
    head = ShardedMarginSoftmax(5, 7, "arcface", sample=0.5)
    with pytest.raises(ValueError, match="label 7 must be one of the 7 classes, from 0 to 6"):
        head(torch.randn(3, 5), torch.tensor([6, 7, -1]))


@pytest.mark.parametrize("sample", [1.0, 0.5])
def test_a_head_created_before_the_process_group_is_rejected(monkeypatch: pytest.MonkeyPatch, sample: float):
    """Each process would train all classes, or count them once per process."""
    head = ShardedMarginSoftmax(5, 7, "arcface", sample=sample)
    monkeypatch.setattr("dcnet.losses.sharded.rank_of", lambda group: (1, 2))
    with pytest.raises(ValueError, match="created in process 0 of 1, but is called in 1 of 2: create it after"):
        head(torch.randn(3, 5), torch.tensor([0, 6, 2]))


def test_each_process_needs_a_class(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dcnet.losses.sharded.rank_of", lambda group: (0, 12))
    with pytest.raises(ValueError, match="num_classes must be at least the number of processes, 12, not 10"):
        ShardedMarginSoftmax(5, 10, "arcface")


def test_one_process_alone_has_all_classes():
    torch.manual_seed(0)
    sharded, whole = ShardedMarginSoftmax(5, 7, "arcface"), MarginSoftmax(5, 7, "arcface")
    whole.load_state_dict(sharded.state_dict())
    x, labels = torch.randn(4, 5), torch.randint(7, (4,))
    assert sharded(x, labels) == whole(x, labels)
    assert torch.equal(sharded.full_weight(), whole.weight)


def test_two_heads_have_different_weights():
    """They come from the global generator: reproducible from a seed, and different for each head."""
    torch.manual_seed(0)
    one, two = ShardedMarginSoftmax(5, 7), ShardedMarginSoftmax(5, 7)
    assert not torch.equal(one.weight, two.weight)
    torch.manual_seed(0)
    assert torch.equal(ShardedMarginSoftmax(5, 7).weight, one.weight)
    assert torch.equal(ShardedMarginSoftmax(5, 7).weight, two.weight)
    two.reset_parameters()
    assert not torch.equal(two.weight, one.weight)


def test_a_head_on_the_meta_device_gets_its_weights_later():
    with torch.device("meta"):
        head = ShardedMarginSoftmax(5, 7, "arcface")
    head.to_empty(device="cpu").reset_parameters()
    assert 0.1 < head.weight.std() < 1
    assert head(torch.randn(3, 5), torch.tensor([0, 6, 2])).isfinite()


def test_prediction_in_one_process_has_a_gradient_for_the_weights():
    head = ShardedMarginSoftmax(5, 7, "softmax")
    head.logits(torch.randn(3, 5)).sum().backward()
    assert head.weight.grad is not None
    assert head.bias.grad is not None


@pytest.mark.parametrize("name", registry)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_sample_of_all_classes_gives_the_full_loss_for_small_features(name: str, dtype: torch.dtype):
    """Gradients do not overflow in half precision, not even for zero features."""
    torch.manual_seed(0)
    # 0.99 of four classes, rounded up, are all of them.
    share, whole = (make(5, 4, name) for make in (partial(ShardedMarginSoftmax, sample=0.99), MarginSoftmax))
    whole.load_state_dict(share.state_dict())
    features = torch.cat([torch.zeros(1, 5), 1e-3 * torch.randn(3, 5)]).to(dtype).requires_grad_()
    losses = [head(features, torch.tensor([0, 1, 2, 3])) for head in (share, whole)]
    torch.testing.assert_close(*losses)
    of_share, of_whole = (torch.autograd.grad(loss, features)[0] for loss in losses)
    assert of_share.isfinite().all()
    torch.testing.assert_close(of_share, of_whole)


@pytest.mark.parametrize("sample", [0.0, 1.5, -1])
def test_invalid_samples_are_rejected(sample):
    with pytest.raises(ValueError, match="sample must be in"):
        ShardedMarginSoftmax(5, 7, sample=sample)


def test_one_process_may_sample_its_classes():
    torch.manual_seed(0)
    head = ShardedMarginSoftmax(5, 40, "am-softmax", sample=0.25).double()
    features, labels = torch.randn(3, 5, dtype=torch.float64), torch.tensor([0, 7, 39])
    loss = head(features, labels)
    loss.backward()
    used = head.weight.grad.abs().sum(1) > 0
    assert used.sum() == 10
    assert used[labels].all()
    whole = MarginSoftmax(5, 40, "am-softmax").double()
    whole.load_state_dict(head.state_dict())
    # The other classes add to the sum below the logarithm.
    assert loss < whole(features, labels)
    assert torch.allclose(head.eval()(features, labels), whole(features, labels))


def test_a_score_counts_all_classes_in_training_mode_too():
    torch.manual_seed(0)
    head = ShardedMarginSoftmax(4, 100, "arcface", sample=0.05)
    x, labels = torch.randn(6, 4), torch.tensor([0, 1, 2, 50, 98, 99])
    losses, classes = head.score(x, labels)
    torch.testing.assert_close(losses, torch.nn.functional.cross_entropy(head.logits(x), labels, reduction="none"))
    assert torch.equal(classes, head.logits(x).argmax(1))
    head.eval()
    assert all(torch.equal(one, two) for one, two in zip((losses, classes), head.score(x, labels), strict=True))


@pytest.mark.parametrize("sample", [1.0, 0.5])
def test_ignored_samples_have_a_score_of_zero(sample: float):
    head, labels = ShardedMarginSoftmax(4, 7, "arcface", sample=sample), torch.tensor([-100, 6, -100])
    x = torch.randn(3, 4)
    losses, _ = head.score(x, labels)
    expected = torch.nn.functional.cross_entropy(head.logits(x), labels, reduction="none")
    torch.testing.assert_close(losses, expected)
    assert losses[0] == losses[2] == 0
