"""Which convolutions use the fused kernels, tested with fake tensors on a GPU that is not installed."""

import copy
import dataclasses
import os
import pickle
import subprocess
import sys
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from helpers.kernel_comparison import DEVICE, a_convolution, images, quiet_numpy, takes_kernels
from helpers.operators import operator_params
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import dcnet
from dcnet import Learnable, Operator
from dcnet.component import constant
from dcnet.kernels import conv2d, fits, use_kernels
from dcnet.kernels.plan import has_device_functions, plan_of
from dcnet.parameters import Value


def on_gpu(*shape, dtype=torch.float32):
    with FakeTensorMode():
        return torch.empty(shape, dtype=dtype, device="cuda")


def doubled(n: Tensor) -> Tensor:
    return 2 * n


# --- operators ---


@pytest.mark.parametrize("operator", operator_params())
def test_operators_with_device_functions_use_kernels(operator):
    """If the norm cancels and g is more than the cosine, torch's own convolution is used."""
    op = Operator.parse(operator)
    norm_cancels = op.magnitude.proportional and op.angle.homogeneous
    if not norm_cancels:
        assert takes_kernels(operator) == has_device_functions(op)
    elif not op.angle.identity:
        assert not takes_kernels(operator)


@pytest.mark.parametrize(
    "operator", ["tanh-spline", "tanh&log-cos", Operator(doubled), Operator("log", doubled)], ids=str
)
def test_operators_without_device_functions_fall_back_to_torch(operator):
    assert not takes_kernels(operator)


def test_missing_operator_falls_back_to_torch():
    assert not takes_kernels(None)


@pytest.fixture
def _own_registry():
    """Removes the magnitudes that a test registers."""
    before = set(dcnet.magnitude.registry)
    yield
    for name in set(dcnet.magnitude.registry) - before:
        del dcnet.magnitude.registry[name]


def register(magnitude):
    dcnet.magnitude.registry[magnitude.name] = magnitude
    return magnitude


@pytest.mark.usefixtures("_own_registry")
def test_new_magnitude_uses_kernels_once_it_has_a_device_function():
    @register
    @dataclasses.dataclass(frozen=True)
    class Root(dcnet.magnitude.Magnitude):
        name: ClassVar[str] = "root_of_torch"
        equation: ClassVar[str] = "sqrt({n})"

        def value(self, n: Tensor) -> Tensor:
            return n.sqrt()

    @register
    @dataclasses.dataclass(frozen=True)
    class RootWithKernel(Root):
        name: ClassVar[str] = "root_with_kernel"
        device: ClassVar[Any] = staticmethod(dcnet.magnitude.Sphere.device)

        def value(self, n: Tensor) -> Tensor:
            return n.sqrt()

    assert not takes_kernels("root_of_torch-cos")
    assert takes_kernels("root_with_kernel-cos")
    assert plan_of("root_with_kernel-cos").magnitude is dcnet.magnitude.Sphere.device


@pytest.mark.usefixtures("_own_registry")
def test_subclass_with_another_equation_does_not_use_the_kernel_of_its_parent():
    """The parent's device function would silently compute the parent's equation."""

    @register
    @dataclasses.dataclass(frozen=True)
    class Twice(dcnet.magnitude.Tanh):
        name: ClassVar[str] = "twice_tanh"

        def value(self, n: Tensor, scale: Value, radius: Value) -> Tensor:
            return 2 * super().value(n, scale=scale, radius=radius)

    assert not takes_kernels("twice_tanh-cos")


def test_unregistered_magnitude_does_not_use_kernels():
    """Plans are made from specs, which are parsed by the registries."""

    @dataclasses.dataclass(frozen=True)
    class Unregistered(dcnet.magnitude.Tanh):
        name: ClassVar[str] = "unregistered"
        device: ClassVar[Any] = staticmethod(dcnet.magnitude.Tanh.device)

    assert not takes_kernels(Operator(Unregistered(), "cos"))


@pytest.mark.usefixtures("_own_registry")
def test_too_many_learned_constants_fall_back_to_torch():
    @register
    @dataclasses.dataclass(frozen=True)
    class Many(dcnet.magnitude.Magnitude):
        name: ClassVar[str] = "many"
        equation: ClassVar[str] = "{first} {second} {third} {fourth} {n}"
        device: ClassVar[Any] = staticmethod(dcnet.magnitude.Sphere.device)
        first: float = constant(1.0, "a")
        second: float = constant(1.0, "b")
        third: float = constant(1.0, "c")
        fourth: float = constant(1.0, "d")

    assert takes_kernels("many(learnable=True)-cos")
    assert not takes_kernels(Operator(Many(learnable=True), dcnet.angle.Sigmoid(k=Learnable(0.3))))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda operator: pickle.loads(pickle.dumps(operator))])
@pytest.mark.parametrize("spec", ["tanh-cos", "seg-sigmoid+product"])
def test_copied_operators_use_kernels(spec, copied):
    """Copied, folded and unpickled models have such operators."""
    assert takes_kernels(copied(Operator.parse(spec)))


# --- switches ---


def test_kernels_can_be_turned_off_and_on():
    with use_kernels(False):
        assert not takes_kernels("tanh-cos")
        with use_kernels(True):
            assert takes_kernels("tanh-cos")
        assert not takes_kernels("tanh-cos")
    assert takes_kernels("tanh-cos")


def test_kernels_are_on_again_after_an_error():
    with pytest.raises(KeyError), use_kernels(False):
        raise KeyError
    assert takes_kernels("tanh-cos")


def test_environment_variable_turns_kernels_off():
    code = """if True:
        from dcnet.kernels import use_kernels
        from helpers.kernel_comparison import takes_kernels
        print(takes_kernels("tanh-cos"))
        with use_kernels(True):
            print(takes_kernels("tanh-cos"))
    """
    environment = {**os.environ, "DCNET_KERNELS": "off", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.split() == ["False", "True"]


# --- tensors ---


def test_cpu_does_not_use_kernels():
    x, w = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3)
    assert not fits(x, w, None, 0, 1, {"operator": "tanh-cos"})
    assert not takes_kernels("tanh-cos", w=w)


def test_old_gpu_does_not_use_kernels(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (7, 5))
    assert not fits(*a_convolution(), None, 0, 1, {"operator": "tanh-cos"})


@pytest.mark.parametrize(
    ("dtype", "of_filters", "taken"),
    [
        (torch.float32, torch.float32, True),
        (torch.bfloat16, torch.bfloat16, True),
        (torch.float16, torch.float16, True),
        (torch.float64, torch.float64, False),
        (torch.float32, torch.float64, False),
        (torch.float32, torch.bfloat16, False),
        (torch.bfloat16, torch.float16, False),
    ],
)
def test_dtypes(dtype, of_filters, taken):
    x, w = on_gpu(2, 3, 5, 5, dtype=dtype), on_gpu(4, 3, 3, 3, dtype=of_filters)
    assert takes_kernels("tanh-cos", x, w) == taken


def test_float32_filters_with_half_precision_input_need_autocast():
    """Without autocast, different dtypes are an error in torch, too."""
    assert not takes_kernels("tanh-cos", on_gpu(2, 3, 5, 5, dtype=torch.bfloat16))


@pytest.mark.parametrize("bias", [torch.float64, torch.float16])
def test_bias_of_another_dtype_falls_back_to_torch(bias):
    assert not takes_kernels("tanh-cos", bias=on_gpu(4, dtype=bias))


@pytest.mark.parametrize("shape", [(1,), (3,), (4, 1), ()])
def test_bias_of_another_shape_falls_back_to_torch(shape):
    """Kernels would read out of bounds."""
    assert takes_kernels("tanh-cos", bias=on_gpu(4))
    assert not takes_kernels("tanh-cos", bias=on_gpu(*shape))


@pytest.mark.parametrize(
    ("x", "w", "groups"),
    [
        ((3, 5, 5), (4, 3, 3, 3), 1),
        ((3, 3, 5), (4, 3, 3, 3), 1),
        ((0, 3, 5, 5), (4, 3, 3, 3), 1),
        ((2, 3, 5), (4, 3, 3), 1),
        ((2, 3, 5, 5, 5), (4, 3, 3, 3, 3), 1),
        ((2, 4, 5, 5), (4, 3, 3, 3), 1),
        ((2, 3, 5, 5), (4, 3, 3, 3), 2),
        ((2, 6, 5, 5), (5, 3, 3, 3), 2),
        ((2, 3, 64, 64), (4, 3, 15, 15), 1),
        ((2, 3, 5, 5), (5000, 3, 3, 3), 1),
        ((2**16, 64, 2**8, 2**8), (4, 64, 3, 3), 1),
        ((2**16, 2**10, 2**3, 2**2), (2**10, 1, 3, 3), 2**10),
        ((1, 2**16, 1, 2**10), (2**15, 2**16, 1, 1), 1),
        ((1, 8, 1, 2**20), (2**12, 8, 1, 1), 1),
    ],
)
def test_shapes_that_fall_back_to_torch(x, w, groups):
    assert not takes_kernels("tanh-cos", on_gpu(*x), on_gpu(*w), groups=groups)


def test_padding_counts_in_the_number_of_positions():
    x, w = on_gpu(2**20, 3, 1, 1), on_gpu(4, 3, 1, 1)
    assert takes_kernels("tanh-cos", x, w, padding=20)
    assert not takes_kernels("tanh-cos", x, w, padding=23)


def test_positions_of_the_last_step_of_a_loop_are_32_bit_integers():
    w = on_gpu(2, 2, 1, 1)
    assert takes_kernels("tanh-cos", on_gpu(2**20, 2, 1, 2**11 - 5), w, padding=0)
    assert not takes_kernels("tanh-cos", on_gpu(2**20, 2, 1, 2**11 - 1), w, padding=0)


def test_slices_count_in_the_number_of_positions():
    """Each of 8 slices has its own gradient of the norms."""
    w = on_gpu(2**12, 16, 1, 1)
    assert takes_kernels("tanh-cos", on_gpu(2**15, 16, 2**6, 2**6), w, padding=0)
    assert not takes_kernels("tanh-cos", on_gpu(2**16, 16, 2**6, 2**6), w, padding=0)


def test_tensors_made_of_others_fall_back_to_torch():
    """A DTensor has no memory of its own that a kernel could read."""
    x, w = a_convolution()
    assert takes_kernels("tanh-cos", x, w)
    assert not takes_kernels("tanh-cos", x, TwoTensor(w, w))
    assert not takes_kernels("tanh-cos", TwoTensor(x, x), w)


@pytest.mark.parametrize(
    ("padding", "kernel", "taken"),
    [
        (2, (3, 3), True),
        ((1, 0), (3, 3), True),
        ("valid", (2, 4), True),
        ("same", (3, 5), True),
        ("same", (2, 3), False),
        ("smae", (3, 3), False),
    ],
)
def test_paddings(padding, kernel, taken):
    assert takes_kernels("tanh-cos", w=on_gpu(4, 3, *kernel), padding=padding) == taken


@quiet_numpy
@pytest.mark.parametrize(("radius", "size"), [("Radius(per_channel=False)", 4), ("Radius()", 1)])
def test_constants_of_other_sizes_broadcast_as_in_torch(radius, size):
    """torch broadcasts them; the kernels must give the same result, and not read out of bounds."""
    operator, stored = f"tanh(radius={radius})-cos", torch.linspace(0.5, 2, size, device=DEVICE)
    with mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)):
        constants = {"radius": on_gpu(size)}
        taken = fits(*a_convolution(), None, 0, 1, {"operator": operator, "constants": constants})
    if taken:
        x, w = images(2, 3, 5, 5), images(4, 3, 3, 3)
        options = {"operator": operator, "constants": {"radius": stored}}
        with use_kernels(False):
            wanted = dcnet.functional.decoupled_conv2d(x, w, **options)
        torch.testing.assert_close(conv2d(x, w, None, 1, 0, 1, 1, options), wanted, rtol=1e-4, atol=1e-5)


# --- transforms and traces ---


def test_functorch_transforms_use_torch():
    seen = []

    def ask(x):
        seen.append(takes_kernels("tanh-cos"))
        return x.sum()

    torch.func.grad(ask)(torch.ones(3))
    torch.func.vmap(ask)(torch.ones(3, 2))
    torch.func.jvp(ask, (torch.ones(3),), (torch.ones(3),))
    assert seen == [False] * 3


def test_forward_mode_autograd_uses_torch():
    """The kernels have no forward-mode derivative; tangents would be lost."""
    with forward_ad.dual_level():
        assert not takes_kernels("tanh-cos")


@pytest.mark.filterwarnings("ignore")
def test_jit_trace_uses_torch():
    seen = []

    def ask(x):
        seen.append(takes_kernels("tanh-cos"))
        return 2 * x

    torch.jit.trace(ask, torch.ones(3), check_trace=False)
    assert seen == [False]


def test_plan_follows_a_part_that_is_replaced_in_its_registry():
    """Otherwise the kernels would silently compute the old equation."""
    before, replaced = plan_of("sphere-cos"), dcnet.magnitude.registry["sphere"]

    @dataclasses.dataclass(frozen=True)
    class Root(replaced):
        device: ClassVar[Any] = staticmethod(dcnet.magnitude.Tanh.device)

    dcnet.magnitude.registry["sphere"] = Root
    try:
        assert plan_of("sphere-cos").magnitude is dcnet.magnitude.Tanh.device
    finally:
        dcnet.magnitude.registry["sphere"] = replaced
    assert plan_of("sphere-cos").magnitude is before.magnitude


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import dcnet, dcnet.kernels.dispatch, torch
from dcnet.losses import MarginSoftmax

assert not dcnet.kernels.dispatch.enabled()
for layer, shape in (
    (dcnet.DecoupledConv2d(4, 4, 3, operator="tanh-cos"), (2, 4, 6, 6)),
    (dcnet.DecoupledConv2d(4, 4, 3, operator="linear-cos", groups=4), (2, 4, 6, 6)),
    (dcnet.DecoupledConv1d(4, 3, 3, operator="sphere-cos"), (2, 4, 9)),
    (dcnet.DecoupledLinear(4, 5, operator="sphere-cos"), (2, 4)),
):
    layer(torch.randn(shape)).sum().backward()
    assert layer.weight.grad.isfinite().all()
query = torch.randn(2, 4, 7, 16)
dcnet.functional.decoupled_attention(query, query, query, operator="sphere-cos")
MarginSoftmax(8, 5, "arcface")(torch.randn(3, 8), torch.arange(3)).backward()
"""


def test_without_triton_torch_computes_everything():
    subprocess.run([sys.executable, "-c", WITHOUT_TRITON], check=True)
