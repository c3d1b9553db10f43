"""Muon and SGD on the sphere against plain loops in float64, and against torch's optimizers."""

import copy
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers.filter_networks import decoupled, examples, network
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dcnet
from dcnet.filter_optimizers import ADAMW_RMS, ITERATIONS, NEWTON_SCHULZ, Muon, SphereSGD, orthogonalize


def set_gradients(model, seed):
    """Gives every parameter a random gradient."""
    generator = torch.Generator().manual_seed(seed)
    for value in model.parameters():
        value.grad = torch.randn(value.shape, generator=generator, dtype=value.dtype)


def run(model, optimizer, steps=3):
    for step in range(steps):
        set_gradients(model, step)
        optimizer.step()
    return model


# --- SGD on the sphere ---


def dot(first, second):
    return sum(a * b for a, b in zip(first, second, strict=True))


def rotate(w, m, gradient, angle, momentum):
    """One step of one filter, as lists of numbers: w <- cos(angle) w - sin(angle) m / ||m||."""
    norm = math.sqrt(dot(w, w))
    w = [value / norm for value in w]
    m = [momentum * old + new for old, new in zip(m, gradient, strict=True)]
    along = dot(m, w)
    m = [value - along * own for value, own in zip(m, w, strict=True)]
    size = math.sqrt(dot(m, m))
    direction = [value / size for value in m]
    turned = [math.cos(angle) * a - math.sin(angle) * b for a, b in zip(w, direction, strict=True)]
    carried = [size * (math.cos(angle) * b + math.sin(angle) * a) for a, b in zip(w, direction, strict=True)]
    return turned, carried


def test_filters_rotate_as_in_plain_loops():
    model = network("tanh-cos").double()
    expected = {}
    for name, value in model.named_parameters():
        if any(value is layer.weight for layer in decoupled(model)):
            expected[name] = [(row, [0.0] * len(row)) for row in value.detach().flatten(1).tolist()]
    for step in range(3):
        set_gradients(model, step)
        for name, rows in expected.items():
            gradients = model.get_parameter(name).grad.flatten(1).tolist()
            expected[name] = [rotate(w, m, g, 0.1, 0.8) for (w, m), g in zip(rows, gradients, strict=True)]
    run(model, SphereSGD(model, lr=0.1, momentum=0.8))
    assert expected
    for name, rows in expected.items():
        wanted = torch.tensor([w for w, _ in rows], dtype=torch.float64)
        torch.testing.assert_close(model.get_parameter(name).detach().flatten(1), wanted)


def test_every_step_is_a_rotation_by_the_learning_rate():
    model = network("seg-cos").double()
    optimizer = SphereSGD(model, lr=0.07)
    run(model, optimizer, 1)
    for step in range(1, 4):
        before = [layer.weight.detach().flatten(1).clone() for layer in decoupled(model)]
        set_gradients(model, step)
        optimizer.step()
        for layer, old in zip(decoupled(model), before, strict=True):
            new = layer.weight.detach().flatten(1)
            torch.testing.assert_close(new.norm(dim=1), torch.ones(len(new), dtype=new.dtype))
            torch.testing.assert_close((new * old).sum(1).acos(), torch.full((len(new),), 0.07, dtype=new.dtype))
            momentum = optimizer.state[layer.weight]["momentum_buffer"].flatten(1)
            # The transported momentum is tangent to the sphere at the new filter.
            torch.testing.assert_close((momentum * new).sum(1), torch.zeros(len(new), dtype=new.dtype))


def test_a_filter_without_gradient_stays_and_a_zero_filter_stays_finite():
    model = nn.Sequential(dcnet.DecoupledLinear(4, 3, operator="tanh-cos")).double()
    with torch.no_grad():
        model[0].weight[1] = 0
    start = F.normalize(model[0].weight.detach(), dim=1)
    set_gradients(model, 0)
    model[0].weight.grad[0] = 0
    SphereSGD(model, lr=0.1).step()
    torch.testing.assert_close(model[0].weight.detach()[0], start[0])
    assert model[0].weight.isfinite().all()


def test_steps_on_the_sphere_do_not_depend_on_the_norm_of_filters():
    models = [network("tanh-cos").double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    with torch.no_grad():
        for layer in decoupled(models[1]):
            layer.weight.mul_(5)
    for model in models:
        run(model, SphereSGD(model, lr=0.1), 2)
    for first, second in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(first, second)


def test_the_loss_decreases_on_the_sphere():
    torch.manual_seed(0)
    model, x = network("tanh-cos").double(), examples().double()
    target = torch.randn_like(model(x))
    optimizer = SphereSGD(model, lr=0.02)
    losses = []
    for _ in range(40):
        loss = F.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_weighted_and_plain_networks_raise_an_error():
    weighted = nn.Sequential(dcnet.DecoupledLinear(4, 3, operator="tanh-cos+linear"))
    with pytest.raises(ValueError, match=r"layer '0' has the weighted operator .*which depends on \|\|w\|\|"):
        SphereSGD(weighted)
    with pytest.raises(ValueError, match="no decoupled layer is selected"):
        SphereSGD(nn.Linear(4, 3))
    model = nn.Sequential(dcnet.DecoupledLinear(4, 4), dcnet.DecoupledLinear(4, 3, operator="tanh-cos+linear"))
    optimizer = SphereSGD(model, layers=lambda name, layer: not layer.operator.weighted)
    assert [len(group["params"]) for group in optimizer.param_groups if group["filters"]] == [1]


# --- Muon ---


def product(first, second):
    return [[dot(row, column) for column in zip(*second, strict=True)] for row in first]


def transposed(matrix):
    return [list(row) for row in zip(*matrix, strict=True)]


def newton_schulz(matrix):
    """The iteration of Muon on lists of numbers."""
    turned = len(matrix) > len(matrix[0])
    x = transposed(matrix) if turned else matrix
    norm = math.sqrt(sum(value**2 for row in x for value in row))
    x = [[value / norm for value in row] for row in x]
    a, b, c = NEWTON_SCHULZ
    for _ in range(ITERATIONS):
        squares = product(x, transposed(x))
        fourth = product(squares, squares)
        factor = [[b * p + c * q for p, q in zip(*rows, strict=True)] for rows in zip(squares, fourth, strict=True)]
        x = [[a * p + q for p, q in zip(*rows, strict=True)] for rows in zip(x, product(factor, x), strict=True)]
    return transposed(x) if turned else x


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4), (1, 6)])
def test_orthogonalize_matches_plain_loops(shape):
    torch.manual_seed(0)
    matrices = torch.randn(2, *shape, dtype=torch.float64)
    expected = torch.tensor([newton_schulz(matrix) for matrix in matrices.tolist()], dtype=torch.float64)
    torch.testing.assert_close(orthogonalize(matrices), expected)


def test_singular_values_become_about_one():
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(3, 20, 30)))
    assert values.min() > 0.6
    assert values.max() < 1.3
    assert orthogonalize(torch.zeros(1, 3, 4)).abs().max() == 0


def test_filters_follow_muon_in_plain_loops():
    model = nn.Sequential(dcnet.conv2d(2, 3, 3, operator="tanh-cos"), nn.Conv2d(3, 4, 2), nn.Linear(5, 2)).double()
    expected = {}
    for index in (0, 1):
        w = model[index].weight.detach().flatten(1).tolist()
        expected[index] = (w, [[0.0] * len(w[0]) for _ in w])
    for step in range(3):
        set_gradients(model, step)
        for index, (w, m) in expected.items():
            g = model[index].weight.grad.flatten(1).tolist()
            m = [[0.9 * a + 0.1 * b for a, b in zip(*rows, strict=True)] for rows in zip(m, g, strict=True)]
            mixed = [[0.1 * b + 0.9 * a for a, b in zip(*rows, strict=True)] for rows in zip(m, g, strict=True)]
            # Only the plain layer decays: the norm of the other filters has no effect.
            kept = 1 if index == 0 else 1 - 0.02 * 0.3
            scale = 0.02 * ADAMW_RMS * math.sqrt(max(len(w), len(w[0])))
            rows = zip(w, newton_schulz(mixed), strict=True)
            expected[index] = ([[kept * a - scale * b for a, b in zip(*row, strict=True)] for row in rows], m)
    run(model, Muon(model, lr=0.02, momentum=0.9, weight_decay=0.3))
    for index, (w, _) in expected.items():
        wanted = torch.tensor(w, dtype=torch.float64)
        torch.testing.assert_close(model[index].weight.detach().flatten(1), wanted)


def test_matrices_follow_torch():
    """torch iterates in bfloat16, and the results differ by its rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 8, bias=False), nn.Linear(8, 20, bias=False), nn.Linear(20, 3, bias=False))
    twin = copy.deepcopy(model)
    options = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
    run(model, Muon(model, **options))
    muon = torch.optim.Muon([twin[0].weight, twin[1].weight], adjust_lr_fn="match_rms_adamw", **options)
    run(twin, muon)
    for index in (0, 1):
        moved = (twin[index].weight - model[index].weight).norm() / twin[index].weight.norm()
        assert moved < 0.01


def test_the_classifier_and_vectors_are_left_to_adamw():
    model = dcnet.create_model("resnet32", operator="tanh-cos", num_classes=10, width=0.1)
    for optimizer, count in ((Muon(model), 33), (SphereSGD(model), 31)):
        filters = [value for group in optimizer.param_groups if group["filters"] for value in group["params"]]
        # 31 decoupled convolutions, and two plain ones in shortcuts.
        assert len(filters) == count
        assert all(value is not model.classifier.weight for value in filters)
        held = [value for group in optimizer.param_groups for value in group["params"]]
        assert {id(value) for value in held} == {id(value) for value in model.parameters()}
        assert len(held) == len(set(map(id, held)))


# --- both ---

BOTH = [Muon, SphereSGD]


@pytest.mark.parametrize("kind", [*BOTH, partial(Muon, other_rate=0.1)])
def test_other_parameters_follow_adamw(kind):
    model = network("tanh-cos").double()
    twin = copy.deepcopy(model)
    optimizer = kind(model, lr=0.03, weight_decay=0.1)
    groups = dcnet.optim.param_groups(twin, weight_decay=0.1)
    other = torch.optim.AdamW(groups, lr=0.03 * optimizer.other_rate)
    run(model, optimizer)
    run(twin, other)
    filters = {id(value) for group in optimizer.param_groups if group["filters"] for value in group["params"]}
    compared = 0
    for first, second in zip(model.parameters(), twin.parameters(), strict=True):
        if id(first) not in filters:
            torch.testing.assert_close(first, second)
            compared += 1
    assert compared > 1


@pytest.mark.parametrize("kind", BOTH)
def test_the_state_dict_continues_to_the_same_bits(kind):
    model = network("tanh-cos")
    twin = copy.deepcopy(model)
    optimizer, other = kind(model, lr=0.03), kind(twin, lr=0.5)
    run(model, optimizer)
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in (7, 8):
        for either, its in ((model, optimizer), (twin, other)):
            set_gradients(either, step)
            its.step()
    for first, second in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("kind", BOTH)
def test_bad_steps_change_nothing(kind):
    model = network("tanh-cos")
    optimizer = kind(model, lr=0.03)
    run(model, optimizer)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    set_gradients(model, 9)
    for value in model.parameters():
        value.grad.view(-1)[0] = math.nan
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0)
    optimizer.found_inf = torch.zeros(())
    run(model, optimizer, 1)
    assert not torch.equal(next(iter(model.state_dict().values())), next(iter(before[0].values())))


@pytest.mark.parametrize("kind", BOTH)
def test_the_learning_rate_may_be_a_tensor(kind):
    models = [network("tanh-cos") for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model, rate in zip(models, (0.03, torch.tensor(0.03)), strict=True):
        run(model, kind(model, lr=rate))
    for first, second in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(first, second)


class WithoutSync(TorchDispatchMode):
    """Raises an error if an operation copies a value from the device to the host, which a CUDA graph cannot capture."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(func), "a value was read from the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", BOTH)
def test_steps_never_wait_for_the_device(kind):
    model = network("tanh-cos")
    optimizer = kind(model, lr=torch.tensor(0.03), weight_decay=0.1)
    optimizer.found_inf = torch.zeros(())
    run(model, optimizer)
    set_gradients(model, 0)
    with WithoutSync():
        optimizer.step()
    with pytest.raises(AssertionError, match="read from the device"), WithoutSync():
        torch.ones(()).item()


@pytest.mark.parametrize("kind", BOTH)
def test_parameters_without_gradient_stay_and_closures_are_called(kind):
    model, x = network("tanh-cos"), examples()
    optimizer = kind(model, lr=0.03)
    before = copy.deepcopy(model.state_dict())
    optimizer.step()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])


@pytest.mark.parametrize("kind", BOTH)
def test_parameters_that_are_added_later_follow_adamw(kind):
    model, more = network("tanh-cos"), nn.Linear(4, 3)
    twin = copy.deepcopy(more)
    optimizer = kind(model, lr=0.03)
    optimizer.add_param_group({"params": list(more.parameters()), "weight_decay": 0.1})
    other = torch.optim.AdamW(twin.parameters(), lr=0.03 * optimizer.other_rate, weight_decay=0.1)
    run(more, optimizer)
    run(twin, other)
    torch.testing.assert_close(more.state_dict(), twin.state_dict())


def halves(dtype):
    """A network in half precision, and one in float32 with the same weights."""
    model = nn.Sequential(dcnet.DecoupledLinear(40, 3, operator="tanh-cos"), nn.Linear(3, 2)).to(dtype)
    return model, copy.deepcopy(model).float()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", BOTH)
def test_half_precision_is_float32_up_to_rounding(kind, dtype):
    """The norms of the gradients are about 0.001, and their squares vanish in float16."""
    model, twin = halves(dtype)
    optimizers = kind(model, lr=0.1), kind(twin, lr=0.1)
    set_gradients(model, 0)
    for value, other in zip(model.parameters(), twin.parameters(), strict=True):
        value.grad *= 1e-4
        other.grad = value.grad.float()
    for optimizer in optimizers:
        optimizer.step()
    assert model[0].weight.dtype == dtype
    rounded = twin[0].weight.detach().to(dtype)
    torch.testing.assert_close(model[0].weight.detach(), rounded, rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_norms_and_angles_stay_exact_over_many_steps():
    model = nn.Sequential(dcnet.DecoupledConv2d(3, 8, 3, operator="tanh-cos"), nn.Linear(8, 2))
    weight, optimizer = model[0].weight, SphereSGD(model, lr=0.02)
    for step in range(1000):
        before = weight.detach().flatten(1).double()
        set_gradients(model, step)
        optimizer.step()
    after = weight.detach().flatten(1).double()
    assert (after.norm(dim=1) - 1).abs().max() < 3e-7
    # From the chord, since the cosine of a small angle says little about it.
    chord = (F.normalize(after) - F.normalize(before)).norm(dim=1)
    assert (2 * (chord / 2).asin() - 0.02).abs().max() < 1e-6


@pytest.mark.parametrize("kind", BOTH)
def test_channels_last_filters_have_the_same_steps(kind):
    model = nn.Sequential(
        dcnet.DecoupledConv2d(3, 8, 3, operator="tanh-cos"),
        dcnet.DecoupledConv2d(8, 8, 3, groups=8, operator="tanh-cos"),
        nn.Linear(8, 2),
    ).double()
    twin = copy.deepcopy(model).to(memory_format=torch.channels_last)
    run(model, kind(model, lr=0.1))
    run(twin, kind(twin, lr=0.1))
    assert twin[0].weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(twin.state_dict(), model.state_dict())


@pytest.mark.parametrize("kind", BOTH)
def test_schedules_change_a_rate_that_is_a_tensor(kind):
    """All groups share the tensor, which a schedule must not multiply once per group."""
    models = [network("tanh-cos") for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model, rate in zip(models, (0.03, torch.tensor(0.03)), strict=True):
        optimizer = kind(model, lr=rate)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(3):
            set_gradients(model, step)
            optimizer.step()
            schedule.step()
        assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx(
            [0.00375] * len(optimizer.param_groups)
        )
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", BOTH)
def test_a_gradient_scaler_skips_overflowing_steps(kind):
    model = network("tanh-cos").float()
    twin = copy.deepcopy(model)
    optimizer, other = kind(model, lr=0.03), kind(twin, lr=0.03)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    x = examples().float()
    scaler.scale(model(x).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    twin(x).square().mean().backward()
    other.step()
    torch.testing.assert_close(model.state_dict(), twin.state_dict())
    before = copy.deepcopy(model.state_dict())
    model[0].weight.grad.view(-1)[0] = math.inf
    scaler.step(optimizer)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"lr": 0.0}, "lr must be"),
        ({"lr": math.nan}, "lr must be"),
        ({"momentum": 1.0}, "momentum must be"),
        ({"weight_decay": -0.1}, "weight_decay must not be negative, not -0.1"),
    ],
)
def test_invalid_values_raise_an_error(kind, options, problem):
    with pytest.raises(ValueError, match=problem):
        kind(network("tanh-cos"), **options)


@pytest.mark.parametrize("kind", [Muon, SphereSGD])
def test_parameters_instead_of_a_network_raise_an_error(kind):
    with pytest.raises(TypeError, match=r"model must be a network, an nn\.Module, not generator"):
        kind(network("tanh-cos").parameters())
