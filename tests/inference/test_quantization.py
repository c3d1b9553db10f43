"""Quantization of folded networks: FX graph mode keeps folded layers in float32, PT2E quantizes them."""

import copy
import importlib
import warnings

import pytest
import torch
from torch import nn

import dcnet
from dcnet.inference.folded_layers import Folded


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        # Warnings of torch about its quantization.
        warnings.simplefilter("ignore")
        yield


def folded(x):
    model = nn.Sequential(
        dcnet.DecoupledConv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        dcnet.DecoupledConv2d(8, 8, 3, operator="seg(learnable=True)-sqcos"),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )
    model(x)
    return dcnet.fold(model)


def close(found, expected):
    return (found - expected).abs().max() < 0.05 * expected.abs().max()


def test_fx_graph_mode_leaves_folded_layers_as_they_are():
    quantize_fx = pytest.importorskip("torch.ao.quantization.quantize_fx")
    mapping = importlib.import_module("torch.ao.quantization").get_default_qconfig_mapping("x86")
    x = torch.randn(4, 3, 8, 8)
    model = folded(x)
    prepared = quantize_fx.prepare_fx(copy.deepcopy(model), mapping, (x,))
    prepared(x)
    found = quantize_fx.convert_fx(prepared)
    assert sum(isinstance(module, Folded) for module in found.modules()) == 2
    assert type(found.get_submodule("6")) is not nn.Linear
    assert close(found(x), model(x))


def test_the_program_of_a_folded_network_shows_its_convolutions():
    """A quantizer finds convolutions by their source, and quantizes constant filters."""
    x = torch.randn(4, 3, 8, 8)
    graph = torch.export.export(folded(x), (x,), strict=True).graph
    found = [node for node in graph.nodes if node.target is torch.ops.aten.conv2d.default]
    assert len(found) == 2
    for node in found:
        assert node.args[1].op == "placeholder"
        assert node.meta["source_fn_stack"][-1][1] in (torch.conv2d, nn.functional.conv2d)


def test_pt2e_of_torchao_quantizes_folded_layers():
    pt2e = pytest.importorskip("torchao.quantization.pt2e.quantize_pt2e")
    x86 = importlib.import_module("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
    x = torch.randn(4, 3, 8, 8)
    model = folded(x)
    program = torch.export.export(model, (x,), strict=True).module()
    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = pt2e.prepare_pt2e(program, quantizer)
    prepared(x)
    found = pt2e.convert_pt2e(prepared)
    weights = [node for node in found.graph.nodes if "dequantize_per_channel" in str(node.target)]
    assert len(weights) == 3
    assert close(found(x), model(x))
