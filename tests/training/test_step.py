"""The loss against plain loops, the constraint, the meter and the evaluator."""

import math
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from helpers.small_runs import tiny
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import dcnet
from dcnet.training.evaluation import Evaluator, batches_of
from dcnet.training.step import Captured, Meter, Objective, classification_loss, correct


def loss_in_loops(logits, labels, smoothing, floor):
    total = 0.0
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        highest = max(row)
        shares = [math.exp(value - highest) for value in row]
        for j, share in enumerate(shares):
            wanted = (1 - smoothing) * (j == label) + smoothing / len(row)
            total -= wanted * math.log(share / sum(shares) + floor)
    return total / len(labels)


@given(
    seed=st.integers(0, 99),
    smoothing=st.sampled_from([0.0, 0.01, 0.3]),
    floor=st.sampled_from([0.0, 1e-4, 1e-2]),
    scale=st.sampled_from([0.1, 1.0, 20.0]),
)
def test_classification_loss_matches_the_loops_of_the_paper(seed, smoothing, floor, scale):
    torch.manual_seed(seed)
    logits, labels = scale * torch.randn(5, 7), torch.randint(7, (5,))
    expected = loss_in_loops(logits, labels, smoothing, floor)
    assert classification_loss(logits, labels, smoothing, floor).item() == pytest.approx(expected, rel=1e-4)


def test_half_precision_logits_are_summed_in_float32():
    logits = torch.randn(64, 100).bfloat16()
    labels = torch.randint(100, (64,))
    for floor in (0.0, 1e-4):
        assert classification_loss(logits, labels, 0.1, floor).dtype == torch.float32


@pytest.mark.parametrize("shared", [False, True])
def test_the_gradient_includes_that_of_half_the_regularizer(shared):
    """The config has the coefficient of half the regularizer; shared weights take the way through the loss."""
    model = nn.Sequential(dcnet.DecoupledLinear(4, 4), dcnet.DecoupledLinear(4, 4))
    if shared:
        model[1].weight = model[0].weight
    x = torch.randn(5, 4)
    for factor in (0.3, 0.0):
        loss = model(x).square().sum()
        wanted = torch.autograd.grad(loss + 0.5 * factor * dcnet.regularizers.orthonormal(model), model[0].weight)
        model.zero_grad()
        Objective(tiny(orthonormal=factor), model).backward(model(x).square().sum(), Accelerator(cpu=True))
        torch.testing.assert_close(model[0].weight.grad, *wanted)


def test_correct_counts_predictions():
    logits = torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 1.0]])
    assert correct(logits, torch.tensor([1, 1, 1])).item() == 2


def test_meter_averages_over_images():
    meter = Meter(torch.device("cpu"))
    meter.add(torch.tensor(1.0), torch.tensor(1), 2)
    meter.add(torch.tensor(4.0), torch.tensor(4), 4)
    reading = meter.read()
    assert (reading.loss, reading.accuracy, reading.bad_step) == (3.0, pytest.approx(100 * 5 / 6), None)
    meter.reset()
    meter.add(torch.tensor(5.0), torch.tensor(0), 1)
    assert meter.read().loss == 5.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_meter_keeps_the_first_bad_step(bad):
    meter = Meter(torch.device("cpu"))
    for loss in (1.0, bad, 1.0, float("nan")):
        meter.add(torch.tensor(loss), torch.tensor(1), 1)
    assert meter.read().bad_step == 1
    assert meter.found_bad.item() == 1
    again = Meter(torch.device("cpu"))
    again.restore_(meter.state())
    assert again.read().bad_step == 1


def test_evaluator_uses_all_images_and_restores_the_mode():
    class Odd(nn.Module):
        """Predicts 1 for bright images, and counts its images."""

        seen = 0

        def forward(self, input):
            assert not self.training
            assert input.min() >= 0
            assert input.max() <= 1
            self.seen += len(input)
            bright = (input.mean((1, 2, 3)) > 0.5).float()
            return torch.stack([1 - bright, bright], 1) * 50

    from dcnet.data import Split

    images = torch.tensor([0, 255, 255, 0, 0], dtype=torch.uint8).view(5, 1, 1, 1).expand(5, 1, 4, 4).contiguous()
    model = Odd().train()
    split = Split(images, torch.tensor([0, 1, 0, 0, 0]))
    reading = Evaluator(model, torch.device("cpu"))(batches_of(split, 2))
    assert model.training
    assert model.seen == 5
    assert reading.accuracy == 80
    assert reading.loss == pytest.approx(50 / 5, rel=1e-5)


class FakeGraph:
    """A fake CUDA graph that counts its replays."""

    capturing = False

    def __init__(self):
        self.replays = 0

    def replay(self):
        self.replays += 1


@contextmanager
def fake_capture(graph):
    FakeGraph.capturing = True
    yield
    FakeGraph.capturing = False


def test_captured_calls_are_eager_then_captured_then_replayed(monkeypatch):
    """Tensors of another shape are never replayed."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    fakes = {"CUDAGraph": FakeGraph, "graph": fake_capture, "Stream": lambda: stream, "current_stream": lambda: stream}
    for name, fake in {**fakes, "stream": lambda given: nullcontext()}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    eager, captured = [], []
    call = Captured(lambda x: (captured if FakeGraph.capturing else eager).append(x), warmup=2)
    for value in range(5):
        call(torch.full((3,), value))
    assert [x[0].item() for x in eager] == [0, 1]
    # The graph reads the tensor of its capture, which has the values of the last call.
    assert [x.tolist() for x in captured] == [[4, 4, 4]]
    assert call.graph.replays == 3
    call(torch.full((2,), 7))
    assert (eager[-1].tolist(), captured[0].tolist(), call.graph.replays) == ([7, 7], [4, 4, 4], 3)
