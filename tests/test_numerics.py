"""Zero, tiny, huge and non-finite inputs, half precision, and the running mean norm."""

import math

import pytest
import torch
from helpers.operators import all_operators, fixed_radius, operator_params

import dcnet


def run(layer, x):
    """Output and every gradient, by name."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.float().sum().backward()
    return {"output": y, "input": x.grad, **{name: value.grad for name, value in layer.named_parameters()}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("operator", operator_params())
def test_extreme_norms_give_finite_results_and_gradients(operator, dtype, device):
    layer = dcnet.DecoupledConv2d(8, 6, 3, padding=1, operator=operator, device=device, dtype=dtype)
    direction = torch.randn(2, 8, 5, 5, device=device)
    direction[:, :, :2] = layer.weight[0, :, 1:2, 1:2].float()  # here the angle is often near zero
    for norm in (0.0, 1e-20, 1e15):
        x = (direction / direction.norm() * norm).to(dtype)
        for name, value in run(layer, x).items():
            assert value.isfinite().all(), (name, norm)


def bounded_operators():
    return [name for name in all_operators() if dcnet.Operator.parse(name).properties().bounded]


@pytest.mark.parametrize("operator", operator_params(bounded_operators()))
def test_bounded_operators_are_finite_for_norms_beyond_float16(operator, device):
    layer = dcnet.DecoupledConv2d(16, 4, 3, padding=1, operator=operator, device=device, bias=False)
    torch.nn.init.constant_(layer.weight, 0.1)
    x = torch.full((2, 16, 5, 5), 3e4, device=device)
    expected = layer(x)
    half = layer.half()
    found = run(half, x.half())
    for name, value in found.items():
        assert value.isfinite().all(), name
    # An inner product is clamped to 65504, while the largest norm is 3.6e5.
    assert (found["output"].sign() == expected.sign()).all()
    assert (found["output"].abs() <= 1.01 * expected.abs().max() + 1e-3).all()
    folded = dcnet.fold(half)(x.half())
    assert folded.isfinite().all()
    with torch.autocast(device, torch.float16):
        assert layer.float()(x).isfinite().all()


@pytest.mark.parametrize("operator", ["tanh-cos", "ball-sqcos", "sphere-linear"])
def test_infinite_float16_inputs_give_nan(operator, device):
    x = torch.ones(2, 8, device=device, dtype=torch.float16)
    x[0, 3] = math.inf
    layer = dcnet.DecoupledLinear(8, 4, operator=operator, device=device).half().eval()
    for found in (layer(x), dcnet.fold(settled(layer))(x)):
        assert found[0].isnan().all()
        assert found[1].isfinite().all()


def settled(layer):
    if layer.operator.decay is not None:
        layer.mean_norm.fill_(1.0)
    return layer


@pytest.mark.parametrize("operator", operator_params([name for name in all_operators() if "+" in name]))
def test_weighted_operators_have_finite_gradients_up_to_norms_of_1e12(operator):
    layer = dcnet.DecoupledLinear(8, 6, operator=operator)
    unit = torch.nn.functional.normalize(torch.randn(4, 8))
    with torch.no_grad():
        layer.weight.copy_(1e12 * torch.nn.functional.normalize(layer.weight))
    for name, value in run(layer, 1e12 * unit).items():
        assert value.isfinite().all(), name
    with torch.no_grad():
        layer.weight.mul_(1e3)
        assert layer(1e15 * unit).isfinite().all()


@pytest.mark.parametrize("operator", operator_params())
def test_functions_without_state_match_a_new_layer(operator, device):
    layer = dcnet.DecoupledConv2d(3, 4, 3, operator=operator, device=device)
    x = torch.randn(2, 3, 6, 6, device=device)
    y = dcnet.functional.decoupled_conv2d(x, layer.weight, layer.bias, operator=operator)
    torch.testing.assert_close(y, layer(x))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("operator", operator_params())
def test_zero_patches_give_zero(operator, bias):
    layer = dcnet.DecoupledConv2d(3, 4, 3, bias=bias, operator=operator)
    x = torch.randn(1, 3, 9, 9)
    x[:, :, 3:6, 3:6] = 0
    y = layer(x)[0, :, 3, 3]
    assert (y == (layer.bias if bias else 0)).all()


@pytest.mark.parametrize("operator", operator_params([name for name in all_operators() if "+" not in name]))
def test_zero_patches_without_eps(operator):
    layer = dcnet.DecoupledConv2d(3, 4, 3, operator=operator, eps=0.0, bias=False)
    result = run(layer, torch.zeros(1, 3, 5, 5))
    assert (result["output"] == 0).all()
    assert all(value.isfinite().all() for value in result.values())


@pytest.mark.parametrize("angle", ["linear", "sigmoid", "sigmoid(k=0.01)"])
def test_angles_of_parallel_vectors_are_exact_with_finite_slopes(angle):
    op = dcnet.Operator("sphere", angle)
    cos = torch.tensor([-1.0, 1.0, -1.0000001, 1.0000001, 0.9999999], dtype=torch.float64, requires_grad=True)
    g = op.g(cos, op.constants({}))
    torch.testing.assert_close(g[:2].detach(), torch.tensor([-1.0, 1.0], dtype=torch.float64))
    near = 1 - 2 * math.acos(0.9999999) / math.pi
    if angle == "linear":
        assert g[4].item() == pytest.approx(near, rel=1e-12)
    (slope,) = torch.autograd.grad(g.sum(), cos)
    assert slope.isfinite().all()
    if angle == "linear":
        assert slope[1].item() == pytest.approx(2 / math.pi / math.sqrt(1e-4))


def test_delta_limits_the_slope_of_an_angle():
    for delta in (1e-2, 1e-6):
        op = dcnet.Operator("sphere", dcnet.angle.Linear(delta=delta))
        cos = torch.ones(1, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(op.g(cos, {}).sum(), cos)
        assert slope.item() == pytest.approx(2 / math.pi / math.sqrt(delta))


@pytest.mark.parametrize("p", [1.0, 1.2, 2.0, 7.0])
def test_power_has_finite_slopes_at_zero(p):
    op = dcnet.Operator("sphere", dcnet.angle.Power(p=p))
    cos = torch.tensor([0.0, 1e-30, 0.5], requires_grad=True)
    (slope,) = torch.autograd.grad(op.g(cos, {}).sum(), cos, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), cos, allow_unused=True, materialize_grads=True)
    assert slope.isfinite().all()
    assert curvature.isfinite().all()
    assert slope[2].item() == pytest.approx(p * 0.5 ** (p - 1), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("operator", operator_params())
def test_half_precision_is_the_float64_result_rounded(operator, dtype, device):
    """Inputs and filters are exact in half precision; only the product and the result are rounded."""
    layer = dcnet.DecoupledConv2d(64, 8, 3, padding=1, operator=operator, device=device, dtype=dtype)
    x = torch.randn(2, 64, 6, 6, device=device).to(dtype)
    y = layer(x)
    exact = dcnet.DecoupledConv2d(64, 8, 3, padding=1, operator=operator, device=device, dtype=torch.float64)
    exact.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    expected = exact(x.double())
    assert y.dtype == dtype
    step = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    assert (y.double() - expected).norm() < 2 * step * expected.norm()


@pytest.mark.parametrize("angle", dcnet.angle.registry)
def test_rounding_errors_of_the_cosine_are_not_amplified(angle):
    """In bfloat16 the cosine of a vector with itself can exceed 1; no angle may amplify the error."""
    op = dcnet.Operator("sphere", "power(p=50)" if angle == "power" else angle)
    layer = dcnet.DecoupledLinear(512, 32, bias=False, operator=op, dtype=torch.bfloat16)
    assert layer(layer.weight.detach() * 300).abs().max() <= 1.02


def test_constants_beyond_float16_are_finite():
    """A radius of 90000 is stored as 300, which half precision can hold."""
    operator = "tanh(radius=Radius(relative=False))-cos"
    x, weight, stored = 1000 * torch.randn(2, 8), torch.randn(4, 8), torch.full((4,), 300.0)
    results = [
        dcnet.functional.decoupled_linear(*(t.to(dtype) for t in (x, weight)), operator=operator, constants=constants)
        for dtype in (torch.float16, torch.float32)
        for constants in [{"radius": stored.to(dtype)}]
    ]
    torch.testing.assert_close(results[0].float(), results[1], rtol=1e-2, atol=1e-4)
    assert (results[1].abs() > 1e-4).any()


def test_norms_accumulate_in_float32():
    """Thousands of ones beside one large value: in half precision they would be lost, or overflow."""
    x = torch.full((1, 4096), 1.0)
    x[0, 0] = 256.0
    expected = math.sqrt(4095 + 256**2 + 1e-4)
    for dtype in (torch.bfloat16, torch.float16):
        norm = dcnet.functional.vector_norm(x.to(dtype))
        assert norm.dtype == torch.float32
        assert norm.item() == pytest.approx(expected, rel=1e-6)
        patch = dcnet.functional.patch_norm(x.to(dtype).view(1, 4096, 1, 1), (1, 1), (1, 1), [(0, 0)] * 2, (1, 1))
        assert patch.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("operator", ["tanh-cos", "seg-linear", "linear-cos", "mix-sigmoid+joint"])
def test_autocast_gives_the_dtype_of_plain_layers_and_close_results(operator, device):
    layer = dcnet.DecoupledConv2d(32, 8, 3, padding=1, operator=operator, device=device)
    x = torch.randn(2, 32, 6, 6, device=device)
    with torch.autocast(device, torch.bfloat16):
        y = layer(x)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert all(value.grad.isfinite().all() and value.grad.dtype == torch.float32 for value in layer.parameters())
    assert (y.float() - layer(x)).norm() < 2**-6 * layer(x).norm()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("operator", operator_params())
def test_nan_affects_only_its_own_patches(operator, bad):
    x = torch.randn(2, 3, 8, 8)
    poisoned = x.clone()
    poisoned[1, 1, 2, 2] = bad
    layer = dcnet.DecoupledConv2d(3, 4, 3, operator=operator).eval()
    fixed = dcnet.DecoupledConv2d(3, 4, 3, operator=fixed_radius(operator, 2.0)).train()
    touched = torch.zeros(2, 4, 6, 6, dtype=torch.bool)
    touched[1, :, :3, :3] = True
    for candidate in (layer, fixed):
        y, clean = candidate(poisoned), candidate(x)
        torch.testing.assert_close(y[~touched], clean[~touched], rtol=0, atol=0)
        if math.isnan(bad):
            assert y[touched].isnan().all()


def test_running_mean_starts_from_the_first_batch_and_its_decay_warms_up():
    layer = dcnet.DecoupledConv2d(3, 4, 3, operator="tanh(radius=Radius(decay=0.9))-cos")
    # The warm-up of the decay ends with the 81st batch.
    batches = [torch.randn(2, 3, 5, 5) * scale for scale in [1, 3, 2] * 30]
    assert layer.mean_norm == 0
    expected = None
    for seen, batch in enumerate(batches):
        layer(batch)
        mean = dcnet.functional.patch_norm(batch, (3, 3), (1, 1), [(0, 0)] * 2, (1, 1)).mean().item()
        share = min(0.9, (1 + seen) / (10 + seen))
        expected = mean if expected is None else share * expected + (1 - share) * mean
        assert layer.mean_norm.item() == pytest.approx(expected, rel=1e-5)
        assert layer.num_batches_tracked == seen + 1
    layer.eval()
    layer(batches[0])
    assert layer.mean_norm.item() == pytest.approx(expected, rel=1e-5)
    assert layer.num_batches_tracked == len(batches)


def test_running_mean_does_not_keep_the_graph():
    """Otherwise it would keep the activations of every batch in memory."""
    layer = dcnet.DecoupledConv2d(3, 4, 3)
    layer(torch.randn(2, 3, 6, 6, requires_grad=True))
    assert not layer.mean_norm.requires_grad


def test_evaluation_uses_the_running_mean_and_training_the_batch_mean():
    layer = dcnet.DecoupledConv2d(3, 4, 3, operator="tanh-cos", dtype=torch.float64)
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    layer(x)
    mean = layer.mean_norm.double().item()
    fixed = dcnet.Operator(f"tanh(radius={mean!r})", "cos")
    expected = dcnet.functional.decoupled_conv2d(7 * x, layer.weight, layer.bias, operator=fixed)
    torch.testing.assert_close(layer.eval()(7 * x), expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(layer.train()(7 * x), expected, rtol=1e-3)


def test_gradient_flows_through_the_batch_mean():
    """tanh(n / (rho mean n)) does not change if x is scaled, so its gradient along x is zero."""
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, 3, 3, dtype=torch.float64)
    y = dcnet.functional.decoupled_conv2d(x, weight, operator="tanh-cos", eps=0.0)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    assert abs((gradient * x).sum().item()) < 1e-10


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_or_empty_batch_does_not_change_the_running_mean(bad):
    layer = dcnet.DecoupledConv2d(3, 4, 3, operator="tanh-cos")
    poisoned = torch.randn(2, 3, 5, 5)
    poisoned[0, 0, 0, 0] = bad
    for start in (0.0, 2.5):
        layer.mean_norm.fill_(start)
        layer.num_batches_tracked.fill_(7)
        layer(poisoned)
        layer(torch.zeros(0, 3, 5, 5))
        assert layer.mean_norm == start
        assert layer.num_batches_tracked == 7


def test_casting_a_layer_to_half_precision_keeps_the_running_mean_exact():
    layer = dcnet.DecoupledConv2d(3, 4, 3, operator="tanh-cos")
    layer(torch.randn(2, 3, 5, 5))
    mean = layer.mean_norm.item()
    layer.bfloat16()
    assert layer.weight.dtype == torch.bfloat16
    assert layer.mean_norm.dtype == torch.float32
    assert layer.mean_norm.item() == mean


def test_product_weighting_applies_the_mean_only_to_the_patch_norm():
    op = dcnet.Operator.parse("tanh(radius=Radius(init=0.5,learnable=False))-cos+product")
    layer = dcnet.DecoupledLinear(6, 2, bias=False, operator=op, dtype=torch.float64)
    x = torch.randn(5, 6, dtype=torch.float64)
    n, w_norm = dcnet.functional.vector_norm(x), dcnet.functional.filter_norm(layer.weight)
    h = torch.tanh(w_norm / 0.5) * torch.tanh(n / (0.5 * n.mean()))
    torch.testing.assert_close(layer(x), h * (x @ layer.weight.T) / (n * w_norm))
