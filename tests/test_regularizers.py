"""Regularizers compared with loops over filters, and their effect."""

import collections
import copy
import itertools
import math

import pytest
import torch
from torch import nn

import dcnet
from dcnet.models import create_model
from dcnet.regularizers import hyperspherical_energy, orthogonal, orthonormal, orthonormal_backward_

EVERY = [orthonormal, orthogonal, hyperspherical_energy]
EPS = 1e-4


def everything(name, layer):
    return True


def layer_of(filters, operator="tanh-cos"):
    layer = dcnet.DecoupledLinear(filters.shape[1], filters.shape[0], operator=operator, dtype=filters.dtype)
    with torch.no_grad():
        layer.weight.copy_(filters)
    return layer


def mixed_network():
    return nn.Sequential(
        dcnet.DecoupledConv2d(4, 6, 3, dtype=torch.float64),
        dcnet.DecoupledConv2d(6, 6, 3, groups=3, dtype=torch.float64),
        nn.Conv2d(6, 5, 1, dtype=torch.float64),
        dcnet.DecoupledConv2d(5, 4, 1, operator="sphere-cos+linear", dtype=torch.float64),
        nn.Linear(7, 3, dtype=torch.float64),
        dcnet.DecoupledLinear(5, 4, operator="linear-cos", dtype=torch.float64),
    )


def groups_of(layer):
    filters = [row.flatten() for row in layer.weight]
    size = len(filters) // getattr(layer, "groups", 1)
    return [filters[start : start + size] for start in range(0, len(filters), size)]


def loop_over(layer, measure, normalize):
    """The sum of a measure over all pairs of filters of a group, including a filter with itself."""
    total = 0.0
    for group in groups_of(layer):
        group = [w / w.norm() for w in group] if normalize else group
        for (i, first), (j, second) in itertools.product(enumerate(group), repeat=2):
            total += measure(first, second, i == j)
    return total


def orthonormal_pair(first, second, same):
    return (first @ second - float(same)) ** 2


def orthogonal_pair(first, second, same):
    return 0.0 if same else (first @ second) ** 2


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    ("regularizer", "pair"), [(orthonormal, orthonormal_pair), (orthogonal, orthogonal_pair)], ids=["normal", "gonal"]
)
def test_constraints_match_loops_over_pairs(regularizer, pair, normalize):
    model = mixed_network()
    values = regularizer(model, normalize=normalize, layers=everything, reduce="layers")
    assert list(values) == ["0", "1", "2", "3", "4", "5"]
    for name, layer in model.named_children():
        torch.testing.assert_close(values[name], loop_over(layer, pair, normalize))
    total = regularizer(model, normalize=normalize)
    torch.testing.assert_close(total, sum(values[name] for name in "0135"))


@pytest.mark.parametrize("half_space", [False, True])
@pytest.mark.parametrize("power", [0, 1, 2, 3.5])
def test_energy_matches_a_loop_over_pairs(power, half_space):
    def energy(distance_squared):
        return -0.5 * math.log(distance_squared) if power == 0 else distance_squared ** (-power / 2)

    def pair(first, second, same):
        if same:
            return 0.0
        signs = (1, -1) if half_space else (1,)
        return sum(energy((first - s * second).square().sum().item() + EPS) for s in signs) / len(signs)

    model = mixed_network()
    values = hyperspherical_energy(
        model, power=power, half_space=half_space, eps=EPS, layers=everything, reduce="layers"
    )
    for name, layer in model.named_children():
        pairs = sum(len(group) * (len(group) - 1) for group in groups_of(layer))
        assert values[name].item() == pytest.approx(loop_over(layer, pair, True) / pairs, rel=1e-9)


def test_half_space_matches_the_energy_of_filters_and_negatives():
    """Except for the constant pairs of a filter with its own negative, at distance 2."""
    filters, count = torch.randn(5, 3, dtype=torch.float64), 5
    half = hyperspherical_energy(layer_of(filters), half_space=True).item() * 2 * count * (2 * count - 2)
    both = hyperspherical_energy(layer_of(torch.cat([filters, -filters]))).item() * 2 * count * (2 * count - 1)
    assert both - half == pytest.approx(2 * count / (4 + EPS))


@pytest.mark.parametrize("regularizer", EVERY)
@pytest.mark.parametrize("groups", [1, 2])
def test_gradients(regularizer, groups):
    layer = dcnet.DecoupledConv1d(4, 6, 2, groups=groups, operator="linear-cos", dtype=torch.float64)

    def value(weight):
        with torch.nn.utils.stateless._reparametrize_module(layer, {"weight": weight}):
            return regularizer(layer)

    assert torch.autograd.gradcheck(value, layer.weight.detach().clone().requires_grad_())


def varied_network(layout):
    """Layers of several shapes, some of one shape, with groups, a linear layer and a zero filter."""
    shapes = [(4, 6, 3, 1), (4, 6, 3, 2), (4, 6, 3, 1), (6, 5, 1, 1), (4, 4, 3, 4)]
    layers = [dcnet.DecoupledConv2d(*shape[:3], groups=shape[3]) for shape in shapes]
    model = nn.Sequential(*layers, dcnet.DecoupledLinear(7, 4)).double().to(memory_format=layout)
    torch.nn.init.zeros_(model[0].weight[1])
    return model


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("before", [False, True])
def test_backward_adds_the_gradients_of_autograd(layout, before):
    model = varied_network(layout)
    weights = [layer.weight for layer in model]
    model[3].weight.requires_grad_(False)
    if before:
        # Not in the layout of the weights.
        for weight in weights:
            weight.grad = torch.randn_like(weight, memory_format=torch.contiguous_format)
    wanted = torch.autograd.grad(0.7 * orthonormal(model), [w for w in weights if w.requires_grad])
    wanted = [*wanted[:3], torch.zeros_like(weights[3]), *wanted[3:]]
    if before:
        wanted = [weight.grad + gradient for weight, gradient in zip(weights, wanted, strict=True)]
    orthonormal_backward_(model, 0.7)
    for weight, gradient in zip(weights, wanted, strict=True):
        if before or weight.requires_grad:
            torch.testing.assert_close(weight.grad, gradient, rtol=1e-12, atol=1e-14)
            assert before or weight.grad.stride() == weight.stride()
        else:
            assert weight.grad is None


def test_backward_rejects_weights_that_it_cannot_add_to():
    computed = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(dcnet.DecoupledLinear(4, 4)))
    shared = nn.Sequential(dcnet.DecoupledLinear(4, 4), dcnet.DecoupledLinear(4, 4))
    shared[1].weight = shared[0].weight
    hooked, stepping = nn.Sequential(dcnet.DecoupledLinear(4, 4)), nn.Sequential(dcnet.DecoupledLinear(4, 4))
    hooked[0].weight.register_hook(torch.zeros_like)
    stepping[0].weight.register_post_accumulate_grad_hook(lambda weight: None)
    for model in (computed, shared, hooked, stepping):
        with pytest.raises(ValueError, match=r"add orthonormal\(model\) to the loss"):
            orthonormal_backward_(model)


def test_orthonormal_filters_cost_nothing():
    filters = torch.linalg.qr(torch.randn(8, 5, dtype=torch.float64)).Q.mT
    scaled = filters * torch.arange(1.0, 6.0).unsqueeze(1)
    for regularizer in (orthonormal, orthogonal):
        assert regularizer(layer_of(filters)) < 1e-20
        assert regularizer(layer_of(scaled), normalize=True) < 1e-20
    assert orthogonal(layer_of(scaled), normalize=False) < 1e-20
    assert orthonormal(layer_of(scaled), normalize=False).item() == pytest.approx(9 + 64 + 225 + 576)


def test_constraints_are_equal_for_normalized_filters():
    model = mixed_network()
    torch.testing.assert_close(orthonormal(model, normalize=True), orthogonal(model, normalize=True))


@pytest.mark.parametrize("regularizer", [orthonormal, hyperspherical_energy])
def test_normalized_regularizers_ignore_the_norm(regularizer):
    filters = torch.randn(6, 9)
    norms = torch.logspace(-3, 3, 6).unsqueeze(1)
    torch.testing.assert_close(regularizer(layer_of(filters * norms)), regularizer(layer_of(filters)))


def test_descending_makes_filters_orthonormal():
    model = nn.Sequential(dcnet.DecoupledConv2d(4, 6, 3), dcnet.DecoupledLinear(9, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(200):
        optimizer.zero_grad()
        orthonormal(model, normalize=False).backward()
        optimizer.step()
    for layer in model:
        filters = layer.weight.detach().flatten(1)
        torch.testing.assert_close(filters @ filters.mT, torch.eye(len(filters)), atol=1e-3, rtol=0)


@pytest.mark.parametrize("power", [0, 1, 2])
def test_equal_angles_have_the_least_energy(power):
    """n + 1 filters in n dimensions have the least energy at the corners of a simplex."""
    corners = torch.eye(5, dtype=torch.float64) - 1 / 5
    least = hyperspherical_energy(layer_of(corners), power=power)
    for _ in range(50):
        spread = torch.randn(5, 5, dtype=torch.float64)
        assert hyperspherical_energy(layer_of(spread - spread.mean(1, keepdim=True)), power=power) > least
    layer = layer_of(corners + 0.3 * torch.randn(5, 5, dtype=torch.float64))
    optimizer = torch.optim.SGD([layer.weight], lr=0.5)
    for _ in range(400):
        optimizer.zero_grad()
        hyperspherical_energy(layer, power=power).backward()
        optimizer.step()
    assert hyperspherical_energy(layer, power=power).item() == pytest.approx(least.item(), rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("power", [0, 1, 2])
@pytest.mark.parametrize("half_space", [False, True])
def test_equal_and_zero_filters_have_finite_gradients(power, half_space):
    filters = torch.randn(5, 4)
    filters[1], filters[2], filters[3] = filters[0], -filters[0], 0.0
    layer = layer_of(filters)
    for value in (
        orthonormal(layer),
        orthogonal(layer),
        hyperspherical_energy(layer, power=power, half_space=half_space),
    ):
        value.backward()
        assert value.isfinite()
        assert layer.weight.grad.isfinite().all()


@pytest.mark.parametrize("power", [0, 1, 2])
def test_energy_is_bounded_if_a_cosine_rounds_above_one(power):
    """Their squared distance is clamped to 0, and eps is added."""
    directions = torch.randn(200, 1, 9, generator=torch.Generator().manual_seed(0))
    sizes = torch.tensor([1.0, 3.0]).view(2, 1)
    model = nn.Sequential(*(layer_of(direction * sizes) for direction in directions))
    found = torch.stack(list(hyperspherical_energy(model, power=power, eps=1e-9, reduce="layers").values()))
    most = -0.5 * math.log(1e-9) if power == 0 else 1e-9 ** (-0.5 * power)
    assert found.isfinite().all()
    assert (found <= most * (1 + 1e-5)).all()


def test_energy_of_a_filter_with_itself_does_not_overflow():
    layer = layer_of(torch.eye(3))
    value = hyperspherical_energy(layer, power=60)
    value.backward()
    assert value.item() == pytest.approx(2.0**-30, rel=1e-2)
    assert layer.weight.grad.isfinite().all()


@pytest.mark.parametrize("regularizer", EVERY)
def test_single_filter_costs_nothing(regularizer):
    alone = nn.Sequential(dcnet.DecoupledLinear(4, 1), dcnet.DecoupledConv2d(3, 3, 3, groups=3))
    value = regularizer(alone)
    value.backward()
    assert value.item() == pytest.approx(0, abs=1e-10)
    assert alone[0].weight.grad.isfinite().all()


class Counted(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("regularizer", EVERY)
def test_one_product_for_each_shape_of_filters(regularizer):
    model = create_model("resnet32", width=0.05)
    shapes = {layer.weight.shape for layer in model.modules() if isinstance(layer, dcnet.DecoupledConv2d)}
    with Counted() as seen:
        regularizer(model)
    assert seen.calls["bmm"] == len(shapes) == 6
    assert seen.calls["mm"] == 0


# Operations without a pass over the values of a tensor.
FREE = {"view", "unsqueeze", "permute", "transpose", "select", "squeeze", "detach", "_unsafe_view"}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["first", "last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("regularizer", EVERY)
def test_layers_of_one_shape_are_measured_together(regularizer, dtype, layout):
    calls = []
    for count in (1, 10):
        model = nn.Sequential(*[dcnet.DecoupledConv2d(4, 6, 3, groups=2) for _ in range(count)])
        model.to(dtype).to(memory_format=layout)
        with Counted() as seen:
            torch.autograd.grad(regularizer(model), [layer.weight for layer in model])
        calls.append({name: times for name, times in seen.calls.items() if name not in FREE})
    assert calls[0]["bmm"] == 2
    assert calls[0] == calls[1]


@pytest.mark.parametrize("regularizer", EVERY)
def test_joint_and_separate_measurements_agree(regularizer):
    """For equal and different shapes and memory layouts, with gradients."""
    shapes = [(4, 6, 3, 1), (4, 6, 3, 2), (4, 6, 3, 1), (4, 6, 1, 1), (4, 6, 3, 2), (2, 6, 3, 1)]
    model = nn.Sequential(
        *[dcnet.DecoupledConv2d(*shape[:3], groups=shape[3], operator="linear-cos") for shape in shapes]
    ).double()
    model[2].to(memory_format=torch.channels_last)
    values = regularizer(model, reduce="layers")
    weights = [layer.weight for layer in model]
    gradients = torch.autograd.grad(regularizer(model), weights)
    for layer, value, gradient in zip(model, values.values(), gradients, strict=True):
        twin = copy.deepcopy(layer).to(memory_format=torch.contiguous_format)
        alone = regularizer(twin)
        torch.testing.assert_close(value, alone, rtol=1e-12, atol=1e-12)
        (wanted,) = torch.autograd.grad(alone, twin.weight)
        torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(regularizer(model), sum(values.values()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("regularizer", EVERY)
def test_half_precision_and_autocast_compute_in_float32(regularizer):
    model = create_model("cnn9", width=0.1)
    expected = regularizer(model)
    with torch.autocast("cpu", torch.bfloat16):
        value = regularizer(model)
    assert value.dtype == torch.float32
    assert torch.equal(value, expected)
    half = model.to(torch.bfloat16)
    value = regularizer(half)
    value.backward()
    assert value.dtype == torch.float32
    assert half.body.conv1.layer1.conv.weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(value, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # warnings of torch.compile
@pytest.mark.parametrize("regularizer", EVERY)
def test_compiles_without_graph_breaks(regularizer):
    """Uses inductor, where a backward pass once overwrote memory before it read it."""
    torch.compiler.reset()
    model = nn.Sequential(dcnet.DecoupledConv2d(4, 6, 3), dcnet.DecoupledConv2d(4, 6, 3), nn.Linear(3, 2)).double()

    def gradients(call):
        model.zero_grad()
        call(model).backward()
        return [layer.weight.grad.clone() for layer in model[:2]]

    compiled = torch.compile(lambda network: regularizer(network), fullgraph=True)
    torch.testing.assert_close(gradients(compiled), gradients(regularizer), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("regularizer", EVERY)
def test_layers_are_selected_by_name_and_type(regularizer):
    model = mixed_network()
    assert list(regularizer(model, reduce="layers")) == ["0", "1", "3", "5"]
    plain = regularizer(model, reduce="layers", layers=lambda name, layer: type(layer) is nn.Conv2d)
    assert list(plain) == ["2"]
    transposed = nn.Sequential(nn.ConvTranspose2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(3, 2))
    assert list(regularizer(transposed, reduce="layers", layers=everything)) == ["2"]


@pytest.mark.parametrize("regularizer", EVERY)
def test_invalid_arguments_are_rejected(regularizer):
    with pytest.raises(ValueError, match="the model has no decoupled layers"):
        regularizer(nn.Linear(3, 2))
    with pytest.raises(ValueError, match="`layers` selects none"):
        regularizer(nn.Linear(3, 2), layers=lambda name, layer: False)
    with pytest.raises(ValueError, match="'decoupled' or a function of name and layer, not 'conv'"):
        regularizer(mixed_network(), layers="conv")
    with pytest.raises(ValueError, match="'sum' or 'layers', not 'mean'"):
        regularizer(mixed_network(), reduce="mean")


def test_energy_rejects_invalid_powers_and_eps():
    with pytest.raises(ValueError, match="power must not be negative, not -1"):
        hyperspherical_energy(mixed_network(), power=-1)
    with pytest.raises(ValueError, match="eps must be positive, not 0"):
        hyperspherical_energy(mixed_network(), eps=0)
