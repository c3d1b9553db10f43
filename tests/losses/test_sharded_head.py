"""Heads with their classes shared out over processes."""

from functools import partial
from pathlib import Path

import pytest
import torch
from processes import launch

from dcnet.losses import MarginSoftmax, ShardedMarginSoftmax, registry


def printed_by(processes, script):
    """What processes print that carry out a script of this folder together."""
    return launch(processes, Path(__file__).with_name(script)).stdout


@pytest.mark.parametrize("processes", [2, 4])
def test_shares_give_the_loss_and_the_gradients_of_the_whole(processes):
    """In float64 to 1e-8; 11 classes, which no number of processes shares out evenly."""
    assert printed_by(processes, "sharded_heads.py").count("equal") == processes


def test_a_label_out_of_range_in_one_process_is_told_by_all():
    assert printed_by(3, "strange_labels.py").count("told") == 3


def test_batches_of_other_sizes_are_told_by_all():
    assert printed_by(3, "uneven_batches.py").count("told") == 3


def test_one_process_alone_tells_the_first_label_out_of_range():
    head = ShardedMarginSoftmax(5, 7, "arcface", sample=0.5)
    with pytest.raises(ValueError, match="label 7 is none of the 7 classes, from 0 to 6"):
        head(torch.randn(3, 5), torch.tensor([6, 7, -1]))


@pytest.mark.parametrize("sample", [1.0, 0.5])
def test_a_head_made_before_there_are_processes_is_refused(monkeypatch: pytest.MonkeyPatch, sample: float):
    """Each would train all classes by itself, or count them once for each process."""
    head = ShardedMarginSoftmax(5, 7, "arcface", sample=sample)
    monkeypatch.setattr("dcnet.losses.sharded.rank_of", lambda group: (1, 2))
    with pytest.raises(ValueError, match="made in process 0 of 1 and is called in process 1 of 2: make it after"):
        head(torch.randn(3, 5), torch.tensor([0, 6, 2]))


def test_one_process_alone_has_all_classes():
    torch.manual_seed(0)
    sharded, whole = ShardedMarginSoftmax(5, 7, "arcface"), MarginSoftmax(5, 7, "arcface")
    whole.load_state_dict(sharded.state_dict())
    x, labels = torch.randn(4, 5), torch.randint(7, (4,))
    assert sharded(x, labels) == whole(x, labels)
    assert torch.equal(sharded.full_weight(), whole.weight)


def test_two_heads_have_weights_of_their_own():
    """By torch's own generator: those of a seed come again, and the generator goes on as it would elsewhere."""
    torch.manual_seed(0)
    one, two = ShardedMarginSoftmax(5, 7), ShardedMarginSoftmax(5, 7)
    assert not torch.equal(one.weight, two.weight)
    torch.manual_seed(0)
    assert torch.equal(ShardedMarginSoftmax(5, 7).weight, one.weight)
    assert torch.equal(ShardedMarginSoftmax(5, 7).weight, two.weight)
    two.reset_parameters()
    assert not torch.equal(two.weight, one.weight)


def test_a_head_without_memory_gets_its_weights_later():
    with torch.device("meta"):
        head = ShardedMarginSoftmax(5, 7, "arcface")
    head.to_empty(device="cpu").reset_parameters()
    assert 0.1 < head.weight.std() < 1
    assert head(torch.randn(3, 5), torch.tensor([0, 6, 2])).isfinite()


def test_prediction_has_a_gradient_by_the_weights_where_all_are_here():
    head = ShardedMarginSoftmax(5, 7, "softmax")
    head.logits(torch.randn(3, 5)).sum().backward()
    assert head.weight.grad is not None
    assert head.bias.grad is not None


@pytest.mark.parametrize("name", registry)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_share_that_has_all_classes_gives_the_loss_of_the_whole_for_small_features(name: str, dtype: torch.dtype):
    """And gradients that half precision can hold, at zeros as well."""
    torch.manual_seed(0)
    # So large a share of four classes is all of them.
    share, whole = (make(5, 4, name) for make in (partial(ShardedMarginSoftmax, sample=0.99), MarginSoftmax))
    whole.load_state_dict(share.state_dict())
    features = torch.cat([torch.zeros(1, 5), 1e-3 * torch.randn(3, 5)]).to(dtype).requires_grad_()
    losses = [head(features, torch.tensor([0, 1, 2, 3])) for head in (share, whole)]
    torch.testing.assert_close(*losses)
    of_share, of_whole = (torch.autograd.grad(loss, features)[0] for loss in losses)
    assert of_share.isfinite().all()
    torch.testing.assert_close(of_share, of_whole)


@pytest.mark.parametrize("sample", [0.0, 1.5, -1])
def test_samples_that_make_no_sense(sample):
    with pytest.raises(ValueError, match="share above 0 and at most 1"):
        ShardedMarginSoftmax(5, 7, sample=sample)


def test_one_process_uses_a_share_of_the_classes_too():
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
    # The others add to the sum below the logarithm.
    assert loss < whole(features, labels)
    assert torch.allclose(head.eval()(features, labels), whole(features, labels))
