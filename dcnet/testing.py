"""Checks for custom operators and layers: equation, gradients, finite values and claims."""

import copy
from collections.abc import Sequence
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from dcnet import angle, magnitude
from dcnet.layers import Decoupled
from dcnet.operator import Operator


def assert_decoupled(
    layer: Decoupled,
    input: Tensor | None = None,
    seed: int = 0,
    factors: Sequence[float] = (0.0, 1e-20, 1e15),
) -> None:
    """Raises AssertionError unless the layer computes h(||w||, ||x||) * g(theta), with right gradients, all finite.

    The layer is compared in float64 with the naive formulation, which cuts out every patch. Then its gradients are
    compared with finite differences, its outputs for zero, tiny and huge inputs in float32 must be finite, and the
    claims of its operator must hold: that it is unweighted, that it has a bound, that its spec parses back.

    Args:
        layer: any decoupled layer; its state does not change.
        input: the test input; small and random by default. Keep it away from kinks of custom functions.
        seed: seed of the random input.
        factors: multiples of the input for which all values must be finite.
    """
    if not isinstance(layer, Decoupled):
        raise TypeError(f"layer must be a decoupled layer, not {layer!r}")
    if "blend" in layer._buffers:
        blend = layer.get_buffer("blend").item()
        raise ValueError(f"a layer with a blend is not h * g: give a layer without one, not with {blend:g}")
    layer = copy.deepcopy(layer).double().requires_grad_()
    x = small_input(layer, seed) if input is None else input.detach().to(layer.weight)
    for mode in (True, False):
        _assert_equation(layer.train(mode), x)
    _assert_gradients(layer.eval(), x)
    _assert_finite(layer, x, factors)
    _assert_claims(layer, x)


def small_input(layer: Decoupled, seed: int = 0) -> Tensor:
    """A random input just large enough for a few positions of the filters."""
    generator = torch.Generator().manual_seed(seed)
    shape: list[int] = [5, layer.weight.shape[1]]
    if isinstance(layer, _ConvNd):
        spans = [step * (size - 1) + 1 for size, step in zip(layer.kernel_size, layer.dilation, strict=True)]
        shape = [2, layer.in_channels, *[span + 2 for span in spans]]
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(layer.weight)


def naive(layer: Decoupled, x: Tensor) -> Tensor:
    """f(w, x) + bias, computed slowly from every patch; reads the state of the layer without updating it."""
    if isinstance(layer, _ConvNd) and x.dim() < layer.weight.dim():
        return naive(layer, x.unsqueeze(0)).squeeze(0)
    patches = cut_patches(layer, x) if isinstance(layer, _ConvNd) else x.unsqueeze(-2)
    filters = layer.weight.flatten(1).unflatten(0, (patches.shape[-2], -1))
    n = _root(patches.square().sum(-1, keepdim=True) + layer.eps)
    w_norm = _root(filters.square().sum(-1) + layer.eps)
    cos = torch.einsum("...gk,gok->...go", patches, filters) / (w_norm * n)
    out = _magnitude_times_angle(layer, n, w_norm, cos).flatten(-2)
    out = out if layer.bias is None else out + layer.bias
    return out.movedim(-1, 1) if isinstance(layer, _ConvNd) else out


def _root(squares: Tensor) -> Tensor:
    # Patches of zeros without eps, as in a padded corner, have the cosine 0 and not 0 / 0.
    return squares.clamp(min=torch.finfo(squares.dtype).tiny).sqrt()


def cut_patches(layer: _ConvNd, x: Tensor) -> Tensor:
    """Every patch of a convolution: [N, C, *in] -> [N, *out, groups, values of a filter]."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
    spatial = len(layer.kernel_size)
    windows = zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)
    for dim, (size, stride, dilation) in enumerate(windows, start=2):
        x = x.unfold(dim, dilation * (size - 1) + 1, stride)[..., ::dilation]
    x = x.unflatten(1, (layer.groups, -1)).movedim((1, 2), (1 + spatial, 2 + spatial))
    return x.flatten(2 + spatial)


def _magnitude_times_angle(layer: Decoupled, n: Tensor, w_norm: Tensor, cos: Tensor) -> Tensor:
    op, mean = layer.operator, _mean_norm(layer, n)
    constants = {
        name: value.view(w_norm.shape) if isinstance(value, Tensor) and op.slots[name].per_channel else value
        for name, value in layer.constants().items()
    }
    near = {name: value * mean if op.slots[name].relative else value for name, value in constants.items()}
    factor = op.factor(w_norm, constants)
    return factor * op.h(op.weighting.argument(w_norm, n), near) * op.g(cos, constants)


def _mean_norm(layer: Decoupled, n: Tensor) -> Tensor | float:
    running = layer._buffers.get("mean_norm")
    if layer.training or running is None:
        return n.mean()
    return running if running > 0 else 1.0


def _assert_equation(layer: Decoupled, x: Tensor) -> None:
    difference = (layer(x) - naive(layer, x)).abs().max().item()
    if not difference < 1e-9:
        mode = "training" if layer.training else "evaluation"
        _fail(layer, f"differs by {difference:g} from magnitude times angle in {mode}")


def _assert_gradients(layer: Decoupled, x: Tensor) -> None:
    names = [name for name, _ in layer.named_parameters()]
    values = [parameter.detach().clone().requires_grad_() for parameter in layer.parameters()]

    def call(point: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (point,))

    inputs = (x.clone().requires_grad_(), *values)
    if not torch.autograd.gradcheck(call, inputs, fast_mode=True, raise_exception=False):
        _fail(layer, "has gradients that differ from finite differences")


def _assert_finite(layer: Decoupled, x: Tensor, factors: Sequence[float]) -> None:
    layer = copy.deepcopy(layer).float()
    for factor in factors:
        point = (x.float() * factor).requires_grad_()
        layer.zero_grad()
        out = layer(point)
        out.sum().backward()
        found = {name: parameter.grad for name, parameter in layer.named_parameters()}
        for name, value in {"output": out, "input": point.grad, **found}.items():
            if value is None or not value.isfinite().all():
                kind = "an output" if name == "output" else f"a gradient of its {name}"
                _fail(layer, f"has {kind} that is not finite if inputs are multiplied by {factor:g}")


def _assert_claims(layer: Decoupled, x: Tensor) -> None:
    op, bare = layer.operator, copy.deepcopy(layer)
    bare.bias = None
    out = bare(x)
    bound = op.properties().bound
    if bound is not None and out.abs().max() > bound * (1 + 1e-9):
        _fail(layer, f"says it is bounded by {bound:g} but gives {out.abs().max().item():g}")
    custom = isinstance(op.angle, angle.Custom) or any(
        isinstance(part, magnitude.Custom) for part in op.magnitude.parts
    )
    if not custom and not _parses_back(op):
        _fail(layer, "has a spec that does not parse back to it; is every part of it registered?")
    with torch.no_grad():
        bare.weight.mul_(1e3)
        before = bare(x)
        bare.weight.mul_(1e3)
    if not op.weighted and not torch.allclose(bare(x), before, rtol=1e-6, atol=1e-8):
        _fail(layer, "says it is unweighted but changes when its filters are scaled")


def _parses_back(op: Operator) -> bool:
    try:
        return Operator.parse(str(op)) == op
    except ValueError:
        return False


def _fail(layer: Decoupled, what: str) -> NoReturn:
    raise AssertionError(f"{type(layer).__name__} with operator {str(layer.operator)!r} {what}")
