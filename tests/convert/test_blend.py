"""Gradual conversion from plain to decoupled layers."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import dcnet
from dcnet.convert import BlendSchedule, decouple, finish_blend_


def network():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)
    )


def at(model, blend):
    return decouple(model, "tanh-cos", linear=True, blend=blend).eval()


def test_a_blend_interpolates_between_plain_and_decoupled():
    model, x = network().eval(), torch.randn(2, 3, 4, 4)
    assert torch.equal(at(model, 0.0)(x), model(x))
    assert torch.equal(at(model, 1.0)(x), at(model, None)(x))
    layer = decouple(model[0], "tanh-cos", blend=0.25)
    torch.testing.assert_close(layer(x), 0.75 * layer.plain(x) + 0.25 * layer.decoupled(x))


def test_ordinary_layers_have_no_blend_in_their_state():
    assert "blend" not in dcnet.DecoupledConv2d(3, 4, 3).state_dict()
    layer = dcnet.DecoupledLinear(3, 4, operator="tanh-cos", blend=0.5)
    assert layer.state_dict()["blend"] == 0.5
    layer.bfloat16()(torch.randn(2, 3, dtype=torch.bfloat16)).sum().backward()
    assert layer.weight.grad.isfinite().all()


@pytest.mark.parametrize("blend", [-0.1, 1.5, float("nan")])
def test_a_blend_outside_0_and_1_is_rejected(blend):
    with pytest.raises(ValueError, match="blend must be"):
        decouple(network(), "tanh-cos", blend=blend)
    with pytest.raises(ValueError, match="blend must be"):
        dcnet.DecoupledConv2d(3, 4, 3, blend=blend)


def test_the_schedule_rises_step_by_step_and_stays_at_its_end():
    model = decouple(network(), "tanh-cos", linear=True, blend=0.7)
    schedule = BlendSchedule(model, steps=4)
    seen = [schedule.value]
    for _ in range(6):
        schedule.step()
        seen.append(schedule.value)
        assert model[0].blend == model[3].blend == schedule.value
    assert seen == [0, 0.25, 0.5, 0.75, 1, 1, 1]
    backwards = BlendSchedule(model, steps=3, start=1.0, end=0.1)
    for _ in range(3):
        backwards.step()
    assert backwards.value == 0.1


def test_steps_after_the_end_do_nothing():
    model = decouple(network(), "tanh-cos", blend=0.0)
    schedule = BlendSchedule(model, steps=1)
    schedule.step()
    finish_blend_(model)
    schedule.step()
    assert "blend" not in model[0]._buffers


def test_the_schedule_resumes():
    first = BlendSchedule(decouple(network(), "tanh-cos", blend=0.0), steps=10)
    for _ in range(3):
        first.step()
    model = decouple(network(), "tanh-cos", blend=0.0)
    second = BlendSchedule(model, steps=10)
    second.load_state_dict(first.state_dict())
    assert second.value == first.value == pytest.approx(0.3)
    assert model[0].blend.item() == pytest.approx(0.3)


def test_the_schedule_rejects_invalid_arguments():
    with pytest.raises(ValueError, match="no blended layer"):
        BlendSchedule(decouple(network(), "tanh-cos"), steps=3)
    with pytest.raises(ValueError, match="steps must be a whole number, 1 or more, not 0"):
        BlendSchedule(decouple(network(), "tanh-cos", blend=0.0), steps=0)


def test_a_finished_blend_equals_the_decoupled_network():
    model = decouple(network(), "tanh-cos", linear=True, blend=0.5)
    with pytest.raises(ValueError, match=r"blend of '0' must be 1, not 0\.5"):
        finish_blend_(model)
    BlendSchedule(model, steps=1).step()
    finish_blend_(model)
    reference = decouple(network(), "tanh-cos", linear=True)
    assert model.state_dict().keys() == reference.state_dict().keys()
    reference.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(model(x), reference(x))


def test_a_compiled_network_follows_the_schedule_without_compiling_again():
    torch.compiler.reset()
    model = decouple(network(), "tanh-cos", blend=0.0).eval()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    schedule, x = BlendSchedule(model, steps=3), torch.randn(2, 3, 4, 4)
    outputs = []
    for _ in range(4):
        outputs.append(compiled(x))
        torch.testing.assert_close(outputs[-1], model(x))
        schedule.step()
    assert counter.frame_count == 1
    assert not torch.allclose(outputs[0], outputs[-1])


def test_training_moves_the_filters_at_every_blend():
    for blend in (0.0, 0.5, 1.0):
        model = decouple(network(), "tanh-cos", linear=True, blend=blend)
        model(torch.randn(2, 3, 4, 4)).square().sum().backward()
        assert all(value.grad.isfinite().all() for value in model.parameters())
        assert model[0].weight.grad.abs().sum() > 0


def test_the_schedule_sets_the_blend_at_once_and_limits_loaded_steps():
    model = decouple(nn.Sequential(nn.Linear(3, 4)), "tanh-cos", linear=True, blend=0.0)
    schedule = BlendSchedule(model, steps=10, start=0.25)
    assert model[0].blend == 0.25
    schedule.load_state_dict({"taken": 30})
    assert model[0].blend == 1
    schedule.load_state_dict({"taken": -1})
    assert model[0].blend == 0.25
