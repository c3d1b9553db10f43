"""Calls that ran before: found again only if nothing has changed, and launched with addresses in place of tensors."""

import copy

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from helpers.address_launches import runs_by_address
from helpers.kernel_comparison import ON_GPU, images, make_layer, quiet_numpy, results
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

import dcnet
from dcnet.kernels import convolution, dispatch, known_calls, launch, use_kernels

pytestmark = [quiet_numpy, pytest.mark.skipif(ON_GPU, reason="pretends that tensors of the CPU are on a GPU")]

LEARNING = "tanh(learnable=True)-sigmoid(learnable=True)+product"


@pytest.fixture(autouse=True)
def _on_gpu(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(known_calls, "_known", {})
    monkeypatch.setattr(convolution, "_compiled", {})


def known(layer, x):
    return dispatch.find_known(*layer.arguments(x), layer.options())


def a_known_layer(operator="tanh-cos", **settings):
    """A layer and an input that ran before."""
    layer, x = make_layer(operator, padding=1, **settings), images(2, 3, 5, 6)
    layer(x)
    assert known(layer, x) is not None
    return layer, x


def by_a_copy(layer, x):
    """The output of a copy of the layer without anything known."""
    copied, before = copy.deepcopy(layer), dict(known_calls._known)
    known_calls._known.clear()
    output = copied(x)
    known_calls._known.update(before)
    return output


# --- changes of layer and input ---


class Sub(torch.Tensor):
    """A tensor subclass."""


def set_to(**values):
    def change(layer, x):
        for name, value in values.items():
            setattr(layer, name, value)

    return change


def replace_operator(layer, x):
    layer.operator = dcnet.Operator.parse("tanh-cos+linear")


def copy_operator(layer, x):
    """An equal operator is another object."""
    layer.operator = copy.deepcopy(layer.operator)


def load_other_dtypes(layer, x):
    state = {name: value.double() for name, value in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)


def change_registry(layer, x):
    dcnet.magnitude.registry["tanh"] = dcnet.magnitude.registry["tanh"]


def wrap_weight(layer, x):
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Sub))


CHANGES = {
    "dtype": lambda layer, x: layer.to(torch.bfloat16),
    "dtype in place": lambda layer, x: setattr(layer.weight, "data", layer.weight.data.half()),
    "layout": lambda layer, x: layer.to(memory_format=torch.channels_last),
    "filters": set_to(weight=nn.Parameter(torch.randn(4, 3, 3, 3))),
    "size of filters": set_to(weight=nn.Parameter(torch.randn(2, 3, 1, 1))),
    "bias": set_to(bias=None),
    "dtype of a constant": lambda layer, x: setattr(layer, "radius", half(layer.radius)),
    "size of a constant": set_to(radius=nn.Parameter(torch.ones(1))),
    "strides of a constant": set_to(radius=nn.Parameter(torch.ones(2, 2)[:, 0])),
    "dtype of the mean": lambda layer, x: setattr(layer, "mean_norm", layer.mean_norm.double()),
    "no mean": set_to(mean_norm=None),
    "no count": set_to(num_batches_tracked=None),
    "load_state_dict": load_other_dtypes,
    "operator": replace_operator,
    "copy of the operator": copy_operator,
    "eps": set_to(eps=1e-2),
    "stride": set_to(stride=(2, 2)),
    "padding": set_to(padding=(0, 0)),
    "dilation": set_to(dilation=(2, 2)),
    "groups": set_to(groups=3),
    "evaluation": lambda layer, x: layer.eval(),
    "processes": set_to(sync=object()),
    "registry": change_registry,
    "subclass as weight": wrap_weight,
    "size of the input": lambda layer, x: x.resize_(2, 3, 6, 5),
    "strides of the input": lambda layer, x: x.set_(x.contiguous(memory_format=torch.channels_last)),
    "dtype of the input": lambda layer, x: setattr(x, "data", x.data.half()),
}


def half(parameter):
    return nn.Parameter(parameter.detach().half())


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_call_is_not_known(change):
    layer, x = a_known_layer()
    change(layer, x)
    assert known(layer, x) is None


def test_channels_of_another_device_are_not_known():
    layer, x = a_known_layer()
    layer.radius = nn.Parameter(torch.ones(2, device="meta"))
    assert known(layer, x) is None


# --- modes ---


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def without_kernels():
    return use_kernels(False)


@pytest.mark.parametrize("mode", [without_kernels, Mode, forward_ad.dual_level])
def test_call_is_not_known_in_other_modes(mode):
    layer, x = a_known_layer()
    with mode():
        assert known(layer, x) is None
    assert known(layer, x) is not None


def test_call_is_not_known_under_autocast(monkeypatch):
    layer, x = a_known_layer()
    monkeypatch.setattr("torch.is_autocast_enabled", lambda device: True)
    assert known(layer, x) is None


def test_call_is_not_known_while_compiling(monkeypatch):
    layer, x = a_known_layer()
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)
    assert known(layer, x) is None


def test_call_is_not_known_in_transforms():
    layer, x = a_known_layer()
    seen = []
    torch.func.vmap(lambda y: (seen.append(known(layer, x)), y)[1])(torch.ones(3))
    torch.func.grad(lambda y: (seen.append(known(layer, x)), y.sum())[1])(torch.ones(3))
    assert seen == [None, None]


@pytest.mark.filterwarnings("ignore")
def test_call_is_not_known_in_a_trace():
    layer, x = a_known_layer()
    seen = []
    torch.jit.trace(lambda y: (seen.append(known(layer, x)), 2 * y)[1], torch.ones(3), check_trace=False)
    assert seen == [None]


def test_tensor_subclass_is_not_known():
    layer, x = a_known_layer()
    assert known(layer, x.as_subclass(Sub)) is None


# --- new values ---


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("operator", ["tanh-cos", LEARNING])
def test_known_call_gives_the_same_results(operator, training):
    layer, x = make_layer(operator, padding=1).train(training), images(2, 3, 5, 6).requires_grad_()
    again, cotangent = copy.deepcopy(layer), images(2, 2, 5, 6)
    again.operator = layer.operator
    first = results(lambda layer, x: layer(x), layer, x, cotangent)
    assert known(again, x) is not None
    second = results(lambda layer, x: layer(x), again, x, cotangent)
    assert all(torch.equal(first[name], second[name]) for name in first)


def new_parameters(layer):
    for name, value in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(2 * value.detach()))


def new_values(layer):
    with torch.no_grad():
        for value in layer.parameters():
            value.mul_(3)


def loaded(layer):
    state = {name: 2 * value for name, value in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)


def blended(layer):
    layer.register_buffer("blend", torch.tensor(0.25))


def hooked(layer):
    layer.register_forward_hook(lambda module, args, output: 2 * output)


class Twice(nn.Module):
    def forward(self, value):
        return 2 * value


def parametrized(layer):
    parametrize.register_parametrization(layer, "weight", Twice())
    parametrize.register_parametrization(layer, "radius", Twice())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("change", [new_parameters, new_values, loaded, blended, hooked, parametrized])
def test_known_call_uses_the_current_values(change, training):
    layer, x = make_layer("tanh-cos", padding=1).train(training), images(2, 3, 5, 6)
    before = layer(x)
    change(layer)
    wanted = by_a_copy(layer, x)
    assert known(layer, x) is not None
    found = layer(x)
    assert torch.equal(found, wanted)
    assert not torch.equal(found, before)


def test_known_call_reads_the_mode_of_autograd():
    layer, x = a_known_layer()
    with torch.no_grad():
        assert not layer(x).requires_grad
    assert layer(x).requires_grad
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    assert not layer(x).requires_grad
    assert layer(x.requires_grad_()).requires_grad


def test_lists_as_window_are_accepted_every_time():
    layer, x = a_known_layer()
    first, second = (
        dcnet.functional.decoupled_conv2d(x, layer.weight, None, [1, 1], [1, 1], operator=layer.operator)
        for _ in range(2)
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize("options", [{"contants": {}}, {"eps": -1.0}])
def test_invalid_options_are_rejected_after_a_known_call(options):
    layer, x = a_known_layer()
    with pytest.raises((TypeError, ValueError)):
        dcnet.functional.decoupled_conv2d(
            x, layer.weight, layer.bias, layer.stride, layer.padding, **layer.options() | options
        )


def test_known_calls_keep_their_operator():
    """Its identity is part of the signature, and must not be that of another object."""
    layer, x = a_known_layer()
    assert known(layer, x).operator is layer.operator


def test_number_of_known_calls_is_bounded(monkeypatch):
    monkeypatch.setattr(known_calls, "MOST_COMPILED", 2)
    layer = make_layer("tanh-cos", padding=1)
    for height in range(3, 8):
        layer(images(1, 3, height, 4))
    assert len(known_calls._known) == 2


# --- launches with addresses ---


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["first", "last"])
@pytest.mark.parametrize(("operator", "bias"), [("tanh-cos", False), ("tanh-cos", True), (LEARNING, False)])
def test_launches_with_addresses_give_the_same_results(operator, bias, layout, monkeypatch):
    layer = make_layer(operator, padding=1, bias=bias).to(memory_format=layout)
    x, cotangent = images(2, 3, 5, 6).contiguous(memory_format=layout).requires_grad_(), images(2, 2, 5, 6)
    first, second = copy.deepcopy(layer), copy.deepcopy(layer)
    with runs_by_address(monkeypatch) as taken:
        wanted = results(run_layer, first, x, cotangent)
        assert taken == ["with tensors"] * 7
        found = results(run_layer, second, x, cotangent)
    assert taken[7:] == ["with addresses"] * 7
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def run_layer(layer, x):
    return layer(x)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("kind", "shape"), [("linear", (7, 3)), ("conv2d", (2, 3, 5, 6))])
def test_layers_of_rows_with_addresses_give_the_same_results(kind, shape, bias, monkeypatch):
    if kind == "linear":
        layer, x = dcnet.DecoupledLinear(3, 2, operator="tanh-cos", bias=bias), images(*shape)
    else:
        layer, x = make_layer("tanh-cos", kernel=1, bias=bias), images(*shape).to(memory_format=torch.channels_last)
    cotangent, first, second = torch.randn_like(layer(x)), copy.deepcopy(layer), copy.deepcopy(layer)
    convolution._compiled.clear()
    known_calls._known.clear()
    with runs_by_address(monkeypatch) as taken:
        wanted = results(run_layer, first, x.requires_grad_(), cotangent)
        assert taken == ["with tensors"] * 5
        found = results(run_layer, second, x, cotangent)
    assert taken[5:] == ["with addresses"] * 5
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def overwritten(layer, x):
    return layer(x).mul_(-2).relu_()


def kept_as_copies(layer, x):
    def pack(tensor):
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return layer(x)


def without_alignment(layer, x):
    memory = torch.empty(x.numel() + 1)[1:].as_strided(x.shape, x.stride())
    return layer(memory.copy_(x))


def expanded_gradient(layer, x):
    return layer(x).mean((2, 3), keepdim=True).expand(2, 2, 5, 6)


@pytest.mark.parametrize("run", [overwritten, kept_as_copies, without_alignment, expanded_gradient])
@pytest.mark.parametrize("bias", [False, True])
def test_unusual_calls_after_launches_with_addresses(run, bias, monkeypatch):
    layer = make_layer("tanh-cos", padding=1, bias=bias).to(memory_format=torch.channels_last)
    x = images(2, 3, 5, 6).contiguous(memory_format=torch.channels_last).requires_grad_()
    cotangent, first, second = images(2, 2, 5, 6), copy.deepcopy(layer), copy.deepcopy(layer)
    wanted = results(run, first, x, cotangent)
    with runs_by_address(monkeypatch) as taken:
        results(run_layer, copy.deepcopy(layer), x, cotangent)
        found = results(run, second, x, cotangent)
    if run in (kept_as_copies, without_alignment):
        assert "with tensors" in taken[7:]
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("frozen", [["weight"], ["radius"], ["weight", "radius"], ["input"]])
def test_frozen_tensors_get_no_gradient(frozen, monkeypatch):
    layer, x = make_layer("tanh-cos", padding=1), images(2, 3, 5, 6).requires_grad_("input" not in frozen)
    for name, value in layer.named_parameters():
        value.requires_grad_(name not in frozen)
    copies, cotangent = [copy.deepcopy(layer) for _ in range(3)], images(2, 2, 5, 6)
    wanted = results(run_layer, copies[0], x, cotangent)
    with runs_by_address(monkeypatch):
        results(run_layer, copies[1], x, cotangent)
        found = results(run_layer, copies[2], x, cotangent)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_state_that_hooks_moved_to_any_address_is_aligned_again(monkeypatch):
    """The compiled kernels read several numbers at once."""

    def unpack(tensor):
        return torch.empty(tensor.numel() + 1)[1:].copy_(tensor) if tensor.dim() == 1 else tensor

    layer, x = make_layer("tanh-cos", padding=1, bias=False), images(2, 3, 5, 6).requires_grad_()
    usual, seen = launch.Launch.direct, []

    def direct(self, stream, *addresses):
        seen.extend(address for address in addresses if isinstance(address, int))
        usual(self, stream, *addresses)

    with runs_by_address(monkeypatch):
        layer(x).sum().backward()
        monkeypatch.setattr(launch.Launch, "direct", direct)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            layer(x).sum().backward()
    assert seen
    assert all(address % 16 == 0 for address in seen)


def test_inference_mode_records_nothing_even_with_gradients_enabled():
    layer, x = a_known_layer()
    with torch.inference_mode(), torch.enable_grad():
        assert not layer(x).requires_grad
    assert layer(x).requires_grad
