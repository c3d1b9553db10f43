"""Folded layers by the kernels give what the trained network gives, batch normalisation included."""

import pytest
import torch
from conftest import all_operators
from torch import nn

import dcnet
from dcnet.equation import norm_cancels
from dcnet.folded import FoldedConv
from dcnet.kernels import gate
from dcnet.kernels.plan import has_device_functions

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def covered():
    operators = [dcnet.Operator.parse(spec) for spec in all_operators()]
    return [str(op) for op in operators if has_device_functions(op) and not norm_cancels(op)]


def trained(operator, bias, groups, last):
    """A layer and its normalisation after a few batches, in evaluation, with factors of both signs."""
    conv = dcnet.DecoupledConv2d(6, 8, 3, stride=2, padding=1, groups=groups, bias=bias, operator=operator)
    norm = nn.BatchNorm2d(8)
    model = nn.Sequential(conv, norm).to(DEVICE)
    for _ in range(2):
        model(torch.randn(4, 6, 7, 5, device=DEVICE))
    with torch.no_grad():
        norm.weight.mul_(torch.randn(8, device=DEVICE))
        norm.bias.add_(torch.randn(8, device=DEVICE))
    return model.eval().to(memory_format=torch.channels_last if last else torch.contiguous_format)


def by_kernels(layer, x):
    return gate.folded(x, layer.weight, layer.bias, layer.table(), layer.operator, layer.eps, layer.window)


@pytest.mark.parametrize("operator", covered())
def test_a_folded_layer_by_kernels_gives_what_was_trained(operator):
    for bias, groups, last in ((True, 1, True), (False, 2, False)):
        model = trained(operator, bias, groups, last)
        (layer,) = [module for module in dcnet.fold(model).modules() if isinstance(module, FoldedConv)]
        x = torch.randn(3, 6, 7, 5, device=DEVICE)
        x = x.contiguous(memory_format=torch.channels_last) if last else x
        with torch.no_grad():
            expected, found = model.double()(x.double()), by_kernels(layer, x)
        assert (found - expected).norm() <= 2e-5 * expected.norm()


def test_a_table_follows_its_buffers():
    model = trained("tanh-sqcos", bias=False, groups=1, last=True)
    (layer,) = [module for module in dcnet.fold(model).modules() if isinstance(module, FoldedConv)]
    x, before = torch.randn(1, 6, 7, 5, device=DEVICE), layer.table()
    assert layer.table() is before
    with torch.no_grad():
        output = by_kernels(layer, x) - layer.bias.view(-1, 1, 1)
        layer.factor.mul_(3)
        tripled = by_kernels(layer, x) - layer.bias.view(-1, 1, 1)
    torch.testing.assert_close(tripled, 3 * output, rtol=1e-4, atol=1e-5)


def test_gradients_and_the_cpu_go_by_torch():
    model = trained("tanh-cos", bias=False, groups=1, last=True)
    (layer,) = [module for module in dcnet.fold(model).modules() if isinstance(module, FoldedConv)]
    x = torch.randn(1, 6, 7, 5, device=DEVICE)
    arguments = (layer.weight, layer.bias, layer.operator, layer.window[1], 1)
    assert gate.fits_folded(x, *arguments) == (DEVICE == "cuda")
    assert not gate.fits_folded(x.requires_grad_(), *arguments)
    with torch.no_grad():
        assert gate.fits_folded(x, *arguments) == (DEVICE == "cuda")
