"""Passes in the epilogue of cuDNN's convolutions: when they are chosen, their results, and their order."""

import contextlib
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers.address_launches import runs_by_address
from helpers.kernel_comparison import HALVES, ON_GPU, by_kernels, check, images, make_layer
from helpers.torch_graphs import TorchGraphs

from dcnet.kernels import convolution, cudnn_graphs, plan_cache

SHARED = "tanh(radius=Radius(per_channel=False))-cos"
GRAPHS = ON_GPU and cudnn_graphs.frontend() is not None


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DCNET_CACHE", str(tmp_path))
    return tmp_path / "plans"


def a_layer(operator="tanh-cos", dtype=torch.bfloat16, **settings):
    settings = {"padding": 1, "bias": False, **settings}
    return make_layer(operator, 8, 16, dtype=dtype, **settings).to(memory_format=torch.channels_last)


def an_input(dtype=torch.bfloat16):
    return images(2, 8, 6, 5, dtype=dtype).contiguous(memory_format=torch.channels_last)


def called_kinds(graphs):
    return {kind for kind, _ in graphs.called}


on_cpu = pytest.mark.skipif(ON_GPU, reason="the graphs of torch replace those of cuDNN without a GPU")


# --- results ---


@on_cpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("operator", "kinds"),
    [
        ("tanh-cos", {"tanh", "added"}),
        ("tanh(scale=Learnable())-cos", {"tanh", "added"}),
        ("tanh(radius=0.7)-cos", {"multiplied", "added"}),
        (SHARED, {"multiplied", "added"}),
        ("log-cos", {"multiplied", "added"}),
        ("ball-cos", {"added"}),
        ("tanh-sqcos", {"added"}),
        ("tanh-cos+joint", {"added"}),
        ("tanh(scale=Learnable(per_channel=True))-cos", {"added"}),
    ],
)
def test_results_with_graphs(operator, kinds, dtype):
    layer = a_layer(operator, dtype)
    with TorchGraphs(fast=50.0).installed() as graphs:
        check(layer, an_input(dtype))
        assert {kind for kind, _ in graphs.built} == kinds
        graphs.called.clear()
        check(layer, an_input(dtype))
        assert called_kinds(graphs) == kinds


@on_cpu
@pytest.mark.parametrize(
    "settings",
    [{"stride": 2}, {"dilation": 2}, {"padding": 0}, {"padding": (2, 1)}],
    ids=lambda given: next(iter(given)),
)
def test_windows(settings):
    with TorchGraphs(fast=50.0).installed() as graphs:
        check(a_layer(**settings), an_input())
        assert called_kinds(graphs) == {"tanh", "added"}


@on_cpu
def test_measurements_update_the_running_mean_once():
    layer, x = a_layer().train(), an_input()
    with TorchGraphs(fast=50.0, slow=120.0).installed():
        by_kernels(layer, x)
        assert layer.num_batches_tracked == 1
        by_kernels(layer, x)
        assert layer.num_batches_tracked == 2


@on_cpu
def test_evaluation_uses_the_running_mean():
    layer, x = a_layer(), an_input()
    with TorchGraphs(fast=50.0).installed() as graphs:
        by_kernels(layer.train(), x)
        check(layer.eval(), an_input())
        assert called_kinds(graphs) == {"tanh", "added"}


@on_cpu
def test_frozen_inputs_need_no_graph_of_their_gradient():
    with TorchGraphs(fast=50.0).installed() as graphs:
        check(a_layer(), an_input(), needs_input=False)
        assert {kind for kind, _ in graphs.built} == {"tanh"}


@on_cpu
def test_an_output_that_is_overwritten_is_recomputed():
    layer, x = a_layer(), an_input().requires_grad_()
    with TorchGraphs(fast=50.0).installed():
        (by_kernels(layer, x).relu_()).sum().backward()
        found, x.grad = x.grad, None
    with torch.backends.cudnn.flags(enabled=True):
        (by_kernels(layer, x).relu()).sum().backward()
    assert (found - x.grad).norm() <= 0.03 * x.grad.norm()


class Noted:
    """A launch that notes its calls."""

    runner = None

    def __init__(self, launch, order):
        self.launch, self.order = launch, order

    def __call__(self, *given, **options):
        self.order.append("spread")
        self.launch(*given, **options)


@on_cpu
def test_gradients_of_the_norms_are_known_before_the_data_gradient(monkeypatch):
    layer, x, order = a_layer(), an_input().requires_grad_(), []
    with TorchGraphs(fast=50.0).installed() as graphs:
        by_kernels(layer, x).sum().backward()
        (fused,) = convolution._compiled.values()
        spread, run = fused.passes.spread, graphs.run
        monkeypatch.setattr(fused.passes, "spread", Noted(spread, order))
        monkeypatch.setattr(graphs, "run", lambda *a: (order.append(a[0].kind), run(*a))[1])
        by_kernels(layer, x).sum().backward()
    assert order == ["tanh", "spread", "added"]


# --- the choice ---


@on_cpu
def test_the_fastest_correct_plan_is_chosen_and_remembered(folder):
    layer, x = a_layer(), an_input()
    with TorchGraphs(slow=80.0, fast=60.0, wrong=10.0, unsupported=1.0).installed() as graphs:
        by_kernels(layer, x)
        assert graphs.called[-1] == ("tanh", "fast")
    (path,) = folder.iterdir()
    assert json.loads(path.read_text())["choice"] == {"plan": "fast", "us": 60.0, "passes_us": 100.0}
    with TorchGraphs(slow=1.0, fast=60.0).installed() as graphs:
        by_kernels(layer, x)
        assert graphs.built == [("tanh", "fast")]
        assert graphs.measured == 0


@on_cpu
def test_plans_are_compared_although_eager_mode_runs_launches_directly(folder, monkeypatch):
    layer, x = a_layer(), an_input()
    with runs_by_address(monkeypatch), TorchGraphs(fast=60.0, wrong=10.0).installed() as graphs:
        by_kernels(layer, x)
        assert ("tanh", "wrong") in graphs.called
    (path,) = folder.iterdir()
    assert json.loads(path.read_text())["choice"]["plan"] == "fast"


@on_cpu
def test_frozen_filters_do_not_prevent_the_graph_of_the_input(monkeypatch):
    """The memory for their gradient is never written."""
    layer, x = a_layer().requires_grad_(False), an_input().requires_grad_()
    usual = convolution.Convolution.new_gradients

    def new_gradients(self, w, *given):
        found, *others = usual(self, w, *given)
        return found.fill_(torch.nan), *others

    monkeypatch.setattr(convolution.Convolution, "new_gradients", new_gradients)
    with TorchGraphs(fast=50.0).installed():
        by_kernels(layer, x).sum().backward()
        (fused,) = convolution._compiled.values()
    assert fused.gradient_epilogue.graph is not None


@on_cpu
@pytest.mark.parametrize(("times", "taken"), [({"fast": 50.0}, True), ({"wrong": 50.0}, False)])
def test_remembered_plans_are_called_once_before_a_capture(times, taken, monkeypatch):
    """The call compiles kernels, which a capture could not, and shows whether the plan is still right."""
    (plan,) = times
    monkeypatch.setattr(plan_cache, "remembered", lambda key: {"plan": plan})
    with TorchGraphs(**times).installed(in_eager_mode=False) as graphs:
        by_kernels(a_layer(), an_input())
        assert graphs.called == [("tanh", plan)]
        (fused,) = convolution._compiled.values()
    assert (fused.output_epilogue.graph is not None) == taken


@on_cpu
def test_a_chosen_graph_is_not_used_once_results_must_be_deterministic():
    layer, x = a_layer(), an_input()
    with TorchGraphs(fast=50.0).installed() as graphs:
        by_kernels(layer, x)
        graphs.called.clear()
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=True):
            by_kernels(layer, x)
        assert graphs.called == []


@on_cpu
def test_passes_are_kept_if_they_are_about_as_fast(folder):
    layer, x = a_layer(), an_input()
    with TorchGraphs(fast=98.0).installed() as graphs:
        by_kernels(layer, x)
        graphs.called.clear()
        by_kernels(layer, x)
        assert graphs.called == []
    # Another process remembers it.
    with TorchGraphs(fast=50.0).installed() as graphs:
        by_kernels(layer, x)
        assert (graphs.built, graphs.measured) == ([], 0)
    (path,) = folder.iterdir()
    assert json.loads(path.read_text())["choice"] == {"plan": None, "us": None, "passes_us": 100.0}


@on_cpu
@pytest.mark.parametrize("choice", [None, [], {}, {"plan": 3}, "fast"])
def test_a_remembered_choice_of_another_form_is_measured_again(choice, monkeypatch):
    monkeypatch.setattr(plan_cache, "remembered", lambda key: choice)
    with TorchGraphs(fast=50.0).installed() as graphs:
        by_kernels(a_layer(), an_input())
        assert graphs.measured == 2


@on_cpu
def test_a_remembered_plan_that_no_longer_exists_leaves_the_passes(monkeypatch):
    monkeypatch.setattr(plan_cache, "remembered", lambda key: {"plan": "lost"})
    with TorchGraphs(fast=50.0).installed() as graphs:
        check(a_layer(), an_input())
        assert graphs.called == []


@on_cpu
@pytest.mark.parametrize(
    "flags", [{"benchmark": False}, {"deterministic": True}], ids=["no benchmark", "deterministic"]
)
def test_without_permission_nothing_is_measured(flags):
    with TorchGraphs(fast=50.0).installed(**flags) as graphs:
        by_kernels(a_layer(), an_input())
        assert graphs.measured == 0


@on_cpu
def test_eager_mode_uses_passes(monkeypatch):
    layer, x = a_layer(), an_input()
    with TorchGraphs(fast=50.0).installed() as graphs:
        by_kernels(layer, x)
        monkeypatch.setattr("dcnet.kernels.epilogues.Epilogue.in_eager_mode", False)
        graphs.called.clear()
        by_kernels(layer, x)
        assert graphs.called == []
        monkeypatch.setattr("dcnet.kernels.epilogues.capturing", lambda device: True)
        by_kernels(layer, x)
        assert graphs.called == [("tanh", "fast")]


@on_cpu
def test_deterministic_algorithms_keep_the_passes():
    torch.use_deterministic_algorithms(True)
    try:
        with TorchGraphs(fast=50.0).installed() as graphs:
            by_kernels(a_layer(), an_input())
            assert graphs.measured == 0
    finally:
        torch.use_deterministic_algorithms(False)


@on_cpu
@pytest.mark.parametrize(
    ("settings", "x"),
    [
        ({"dtype": torch.float32}, lambda: an_input(torch.float32)),
        ({"groups": 2}, an_input),
        ({}, lambda: an_input().contiguous()),
    ],
    ids=["float32", "groups", "channels first"],
)
def test_layers_without_graphs(settings, x):
    layer = make_layer("tanh-cos", 8, 16, padding=1, bias=False, **{"dtype": torch.bfloat16, **settings})
    with TorchGraphs(fast=50.0).installed() as graphs:
        check(layer, x())
        assert graphs.built == []


@on_cpu
def test_the_gradient_of_rows_has_no_graph():
    """One pass adds the gradient of their norms, which no other pass computes before."""
    with TorchGraphs(fast=50.0).installed() as graphs:
        check(a_layer(kernel=1, padding=0), an_input())
        assert {kind for kind, _ in graphs.built} == {"tanh"}


@on_cpu
def test_a_bias_keeps_the_pass_over_the_output():
    with TorchGraphs(fast=50.0).installed() as graphs:
        check(a_layer(bias=True), an_input())
        assert {kind for kind, _ in graphs.built} == {"added"}


@on_cpu
def test_a_capture_uses_graphs_only_with_a_handle_that_was_made_before(monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(cudnn_graphs, "capturing", lambda device: False)
    assert cudnn_graphs.ready(device)
    monkeypatch.setattr(cudnn_graphs, "capturing", lambda device: True)
    assert not cudnn_graphs.ready(device)
    monkeypatch.setattr(cudnn_graphs._handles, "by_device", {0: object()}, raising=False)
    assert cudnn_graphs.ready(device)
    assert not cudnn_graphs.ready(torch.device("cuda", 1))


@on_cpu
def test_nothing_is_measured_during_a_capture(monkeypatch):
    layer, x = a_layer(), an_input()
    with TorchGraphs(fast=50.0).installed() as graphs:
        with monkeypatch.context() as patch:
            patch.setattr("dcnet.kernels.epilogues.capturing", lambda device: True)
            by_kernels(layer, x)
        assert graphs.measured == 0
        by_kernels(layer, x)
        assert graphs.measured == 2


def test_without_the_package_there_are_no_graphs(monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", None)
    assert cudnn_graphs.frontend.__wrapped__() is None


@pytest.mark.parametrize("error", [TypeError, ValueError, SyntaxError])
def test_a_broken_package_is_ignored(error, monkeypatch):
    def backend_version():
        raise error

    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace(backend_version=backend_version))
    assert cudnn_graphs.frontend.__wrapped__() is None


# --- on a GPU ---


@contextlib.contextmanager
def searching():
    """As in training: torch searches for the fastest convolutions."""
    convolution._compiled.clear()
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=True):
        yield
    convolution._compiled.clear()


@pytest.fixture
def always_chosen(monkeypatch):
    """A graph is chosen even if it is slower, and used in eager mode as well."""
    monkeypatch.setattr("dcnet.kernels.epilogues.Epilogue.in_eager_mode", True)
    monkeypatch.setattr("dcnet.kernels.epilogues.SAVED", -100.0)
    monkeypatch.setattr("dcnet.kernels.epilogues.MOST_PLANS", 2)


on_gpu = pytest.mark.skipif(not GRAPHS, reason="needs a GPU and the extra `cudnn`")


@on_gpu
@pytest.mark.usefixtures("always_chosen")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("operator", ["tanh-cos", SHARED, "log-cos", "tanh-sqcos"])
def test_cudnn_computes_the_same(operator, dtype):
    layer = make_layer(operator, 32, 64, padding=1, bias=False, dtype=dtype)
    with searching():
        check(layer, images(8, 32, 14, 14, dtype=dtype).contiguous(memory_format=torch.channels_last))
        (fused,) = convolution._compiled.values()
        assert (fused.output_epilogue.graph is not None) == (operator != "tanh-sqcos")
        assert fused.gradient_epilogue.graph is not None


@on_gpu
@pytest.mark.usefixtures("always_chosen")
@pytest.mark.parametrize("settings", [{"stride": 2}, {"dilation": 2, "padding": 2}, {"padding": 0}])
def test_windows_of_cudnn(settings):
    layer = make_layer("tanh-cos", 32, 64, bias=False, dtype=torch.bfloat16, **{"padding": 1, **settings})
    with searching():
        check(layer, images(8, 32, 14, 14, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last))


@on_gpu
@pytest.mark.usefixtures("always_chosen")
def test_graphs_are_captured(monkeypatch):
    layer = make_layer("tanh-cos", 32, 64, padding=1, bias=False, dtype=torch.bfloat16)
    x = images(8, 32, 14, 14, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last).requires_grad_()

    def step():
        output = layer(x)
        return output, *torch.autograd.grad(output.float().square().sum(), [x, layer.weight])

    layer.eval()
    stream = torch.cuda.Stream()
    with searching(), torch.cuda.stream(stream):
        for _ in range(3):
            wanted = step()
        monkeypatch.setattr("dcnet.kernels.epilogues.Epilogue.in_eager_mode", False)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = step()
        for tensor in found:
            tensor.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(fused.output_epilogue.graph is not None for fused in convolution._compiled.values())
        # cuDNN may add in another order in each call.
        for a, b in zip(found, wanted, strict=True):
            assert (a - b).float().norm() <= 1e-2 * b.float().norm()


@on_gpu
@pytest.mark.usefixtures("always_chosen")
def test_compiled_layers_use_graphs():
    layer = make_layer("tanh-cos", 32, 64, padding=1, bias=False, dtype=torch.bfloat16).eval()
    x = images(8, 32, 14, 14, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    with searching(), torch.no_grad():
        wanted, found = layer(x), torch.compile(layer)(x)
        assert all(fused.output_epilogue.graph is not None for fused in convolution._compiled.values())
    assert (found - wanted).float().norm() <= 1e-2 * wanted.float().norm()
