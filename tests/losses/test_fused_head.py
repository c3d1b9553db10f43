"""The fused head: loss and gradients against float64, options, annealing, autograd, compilers and CUDA graphs."""

import copy
import dataclasses
import math
from typing import Any, ClassVar

import pytest
import torch
from helpers.heads_and_batches import loop_options
from helpers.kernel_comparison import quiet_numpy
from helpers.margins_in_loops import loss_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from dcnet.device_functions import constexpr, tl, triton
from dcnet.kernels import use_kernels
from dcnet.losses import Annealing, ArcFace, Automatic, MarginSoftmax, as_margin, fused_head, registry
from dcnet.losses.cosine import EPS

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")

# Every margin with a device function, and other constants that take other branches of it.
FUSED = [name for name in registry if fused_head.fused_spec(as_margin(name)) is not None]
SPECS = [*FUSED, "arcface(m=1.5)", "combined(m1=3,m2=1,m3=0)", "sphereface-r(m=3,detach=False)"]
SPECS += [f"a-softmax(m={m})" for m in (1, 2, 3, 2.5, 7)]


@pytest.fixture(autouse=True)
def _fused_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads use the kernels, without a GPU in the interpreter."""
    if not ON_GPU:
        monkeypatch.setattr(fused_head, "fits", lambda head, *_: head.weight.dtype != torch.float64)


def make(margin: str = "arcface", count: int = 7, features: int = 5, classes: int = 9, **options: Any) -> Any:
    """A head in float32 with weights of several norms, features and labels, one of them ignored."""
    torch.manual_seed(0)
    options.setdefault("annealing", None)
    head = MarginSoftmax(features, classes, margin, **options)
    with torch.no_grad():
        head.weight.copy_(torch.randn(classes, features) * torch.linspace(0.1, 3, classes)[:, None])
    x, labels = 2 * torch.randn(count, features), torch.randint(classes, (count,))
    labels[1] = head.ignore_index
    return head.to(DEVICE), x.to(DEVICE), labels.to(DEVICE)


def results(head: MarginSoftmax, x: Tensor, labels: Tensor, run: Any = None) -> dict[str, Tensor]:
    """Loss and gradients, with other weights of the losses for every sample."""
    x = x.detach().requires_grad_()
    loss = (head if run is None else run)(x, labels)
    weights = torch.linspace(0.5, 2, len(x), device=DEVICE, dtype=loss.dtype) if loss.dim() else loss.new_tensor(1.7)
    inputs = {"features": x, **{name: value for name, value in head.named_parameters() if value.requires_grad}}
    found = torch.autograd.grad((loss * weights).sum(), list(inputs.values()))
    return {"loss": loss.detach(), **dict(zip(inputs, found, strict=True))}


def exact(head: MarginSoftmax) -> MarginSoftmax:
    return copy.deepcopy(head).double()


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 3e-6) -> None:
    """Compares relative to the largest number of a tensor."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        size = float(value.abs().nan_to_num().max())
        torch.testing.assert_close(
            found[name].to(value),
            value,
            rtol=0,
            atol=tolerance * size,
            equal_nan=True,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def check(head: MarginSoftmax, x: Tensor, labels: Tensor, tolerance: float = 3e-6) -> dict[str, Tensor]:
    wanted = results(exact(head), x.double(), labels)
    found = results(head, x, labels)
    assert_close(found, wanted, tolerance)
    return found


# --- margins ---


def test_margins_of_the_cosine_of_the_label_are_fused():
    assert set(FUSED) == {"m-softmax", "a-softmax", "am-softmax", "arcface", "combined", "normface", "sphereface-r"}


@pytest.mark.parametrize("spec", SPECS)
def test_loss_and_gradients(spec: str):
    head, x, labels = make(spec)
    check(head, x, labels)


@pytest.mark.parametrize("spec", SPECS)
def test_loss_equals_that_of_a_loop(spec: str):
    head, x, labels = make(spec, count=4)
    kept = labels != head.ignore_index
    found = head(x[kept], labels[kept]).item()
    wanted = loss_of(head.margin, x[kept].tolist(), labels=labels[kept].tolist(), **loop_options(head, int(kept.sum())))
    assert found == pytest.approx(wanted, rel=2e-6)


@triton.jit
def margin_kernel(cosines, psi, slope, MARGIN: constexpr, NUMBERS: constexpr, SIZE: constexpr):  # noqa: N803
    i = tl.arange(0, SIZE)
    value, rise = MARGIN(tl.load(cosines + i), NUMBERS)
    tl.store(psi + i, value)
    tl.store(slope + i, rise)


@pytest.mark.parametrize("spec", SPECS)
def test_device_functions_and_their_slopes(spec: str):
    """Also at 1 and -1, and beyond by rounding."""
    margin = as_margin(spec)
    cos = torch.cat([torch.linspace(-1, 1, 61), torch.tensor([-1 - 1e-7, 1 + 1e-7, 0.9999999])]).to(DEVICE)
    psi, slope = torch.empty_like(cos), torch.empty_like(cos)
    margin_kernel[(1,)](cos, psi, slope, margin.device, margin.device_numbers(), 64)
    given = cos.double().requires_grad_()
    wanted = margin.target(given)
    (rise,) = torch.autograd.grad(wanted.sum(), given)
    torch.testing.assert_close(psi.double(), wanted.detach(), rtol=2e-6, atol=3e-6)
    # Where pieces meet, either slope is right. At -1 and 1 the slope is the quotient of two small numbers.
    smooth = (rise - slope.double()).abs() < 2e-3 * rise.abs().clamp(min=10)
    assert (~smooth).sum() <= 2
    assert smooth[[0, 60]].all()


def test_a_subclass_with_another_equation_is_not_fused():
    @dataclasses.dataclass(frozen=True)
    class Steeper(ArcFace):
        name: ClassVar[str] = "steeper"

        def target(self, cos: Tensor) -> Tensor:
            return super().target(cos) - 0.1

    assert fused_head.fused_spec(ArcFace()) == "arcface"
    assert fused_head.fused_spec(Steeper()) is None
    assert fused_head.fused_spec(as_margin("sphereface-r(version=2)")) is None


# --- options and sizes ---


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "options",
    [
        {"label_smoothing": 0.1},
        {"interclass_filtering_threshold": 0.2},
        {"scale": "norm"},
        {"scale": "learned"},
        {"scale": "norm", "label_smoothing": 0.3, "margin": "a-softmax(m=2)"},
        {"scale": "learned", "interclass_filtering_threshold": 0.4, "ignore_index": 3},
    ],
    ids=str,
)
def test_options(options: dict[str, Any], reduction: str):
    head, x, labels = make(**options, reduction=reduction)
    check(head, x, labels)


@pytest.mark.parametrize(
    ("count", "features", "classes"), [(1, 2, 2), (2, 33, 5000), (130, 3, 17), (3, 600, 40), (9, 16, 2048)]
)
def test_sizes(count: int, features: int, classes: int):
    """Several parts of the classes, several blocks of rows, and rows that fill no block."""
    head, x, labels = make("a-softmax", max(count, 2), features, classes, annealing=Annealing())
    check(head, x[:count], labels[:count], 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("of_weight", [False, True])
def test_half_precision(dtype: torch.dtype, of_weight: bool):
    """Everything is computed in float32, and gradients are rounded at the end."""
    head, x, labels = make("a-softmax(m=2)")
    x, head = x.to(dtype), head.to(dtype) if of_weight else head
    wanted, found = results(exact(head), x.double(), labels), results(head, x, labels)
    assert found["features"].dtype == dtype
    assert found["weight"].dtype == head.weight.dtype
    torch.testing.assert_close(found["loss"].double(), wanted["loss"], rtol=2e-6, atol=0)
    assert_close(found, wanted, 2 * torch.finfo(dtype).eps)


def test_autocast_changes_nothing():
    head, x, labels = make("a-softmax(m=2)")
    wanted = results(head, x, labels)
    with torch.autocast(DEVICE, torch.bfloat16):
        found = results(head, x, labels)
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("size", [1e-20, 1e16, 1e19, 1e30])
@pytest.mark.parametrize("of", ["features", "weight"])
def test_huge_and_tiny_rows(of: str, size: float):
    head, x, labels = make()
    wanted = head(x, labels)
    with torch.no_grad():
        (x if of == "features" else head.weight).mul_(size)
    found = results(head, x, labels)
    assert all(value.isfinite().all() for value in found.values())
    if size > 1:
        torch.testing.assert_close(found["loss"], wanted)


def test_zero_features_have_a_gradient():
    head, x, labels = make()
    x[0] = 0
    assert EPS > 0
    check(head, x, labels)


@quiet_numpy
def test_a_batch_that_is_ignored_has_no_gradient():
    head, x, labels = make()
    found = results(head, x, torch.full_like(labels, head.ignore_index))
    assert found["loss"].isnan()
    assert not found["features"].any()
    assert not found["weight"].any()


def test_labels_that_are_no_class_make_the_loss_nan():
    head, x, labels = make()
    for bad in (-1, 9, 10**6):
        labels[0] = bad
        # On a GPU the head does not test them.
        assert fused_head.fused_loss(head, x, labels).isnan()


@pytest.mark.parametrize("frozen", ["features", "weight"])
def test_frozen_inputs(frozen: str):
    head, x, labels = make(scale="learned")
    wanted = results(head, x, labels)
    head.weight.requires_grad_(frozen != "weight")
    head(x.requires_grad_(frozen != "features"), labels).backward()
    given = {"features": x.grad, "weight": head.weight.grad, "scale.log": head.scale.log.grad}
    assert given.pop(frozen) is None
    for name, value in given.items():
        torch.testing.assert_close(1.7 * value, wanted[name])


def test_strided_features():
    head, x, labels = make()
    wide = torch.stack([x, x], 2)
    assert torch.equal(head(wide[:, :, 1], labels), head(x, labels))


# --- annealing ---


@pytest.mark.parametrize("annealing", [Annealing(start=3, rate=1, floor=1), Automatic(ready=45, pace=0.5)], ids=str)
def test_annealing_advances_in_training_only(annealing: Any):
    head, x, labels = make("a-softmax", annealing=annealing)
    twin = exact(head)
    for training in (True, True, False, True, False):
        for one in (head, twin):
            one.train(training)
        assert_close(results(head, x, labels), results(twin, x.double(), labels))
        assert head.step.item() == twin.step.item()
        torch.testing.assert_close(head.eased_in, twin.eased_in.float())
    assert head.step.item() == 3


@quiet_numpy
def test_a_batch_that_is_not_finite_keeps_the_share():
    head, x, labels = make("a-softmax", annealing=Automatic(pace=0.5))
    x += 3 * torch.nn.functional.normalize(head.weight.detach())[labels.clamp(min=0)]
    head(x, labels)
    before = head.eased_in.clone()
    assert 0 < before < 1
    head(x * math.nan, labels)
    head(x, torch.full_like(labels, head.ignore_index))
    assert torch.equal(head.eased_in, before)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_batch_counts_once(reentrant: bool):
    head, x, labels = make("a-softmax", annealing=Annealing(start=3, rate=1, floor=1))
    twin, x = copy.deepcopy(head), x.requires_grad_()
    for step in range(2):
        x.grad = None
        checkpoint(head, x, labels, use_reentrant=reentrant).backward()
        assert torch.equal(x.grad, *torch.autograd.grad(twin(x, labels), x))
        assert head.step.item() == step + 1


# --- autograd ---


def test_two_backward_passes():
    """The first one overwrites the inner products; they are computed again."""
    head, x, labels = make()
    loss = head(x.requires_grad_(), labels)
    first, second = (torch.autograd.grad(loss, [x, head.weight], retain_graph=True) for _ in range(2))
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


def test_results_are_deterministic():
    head, x, labels = make(count=70, classes=700)
    first, second = (results(head, x, labels) for _ in range(2))
    assert all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.parametrize("options", [{}, {"scale": "norm", "reduction": "none"}, {"scale": "learned"}], ids=str)
def test_second_derivatives(options: dict[str, Any]):
    head, x, labels = make("am-softmax", annealing=Annealing(start=1, rate=1, floor=1), **options)
    found = []
    for one, given in ((head, x), (exact(head), x.double())):
        given = given.requires_grad_()
        inputs = [given, *one.parameters()]
        gradients = torch.autograd.grad(one(given, labels).sum(), inputs, create_graph=True)
        found.append(torch.autograd.grad(sum((g * g).sum() for g in gradients), inputs))
    names = ["features", *dict(head.named_parameters())]
    assert_close(*(dict(zip(names, values, strict=True)) for values in found), 1e-5)


def test_no_gradient_is_needed():
    head, x, labels = make()
    wanted = head(x, labels).detach()
    with torch.no_grad():
        assert torch.equal(head(x, labels), wanted)
    with torch.inference_mode():
        assert torch.equal(head(x, labels), wanted)


# --- compilers and graphs ---


@pytest.mark.parametrize(
    "options", [{}, {"scale": "learned", "annealing": "auto"}, {"annealing": Annealing(), "reduction": "none"}], ids=str
)
def test_compiled_heads_give_the_same(options: dict[str, Any]):
    torch.compiler.reset()
    head, x, labels = make("a-softmax", **options)
    twin = copy.deepcopy(head)
    run = torch.compile(head, fullgraph=True, backend="inductor" if ON_GPU else "aot_eager")
    for _ in range(2):
        assert_close(results(head, x, labels, run), results(twin, x, labels), 1e-6)
        assert head.step.item() == twin.step.item()
        assert torch.equal(head.eased_in, twin.eased_in)


class Pass(TorchDispatchMode):
    """A mode that changes nothing, under which heads use the custom operation."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{}, {"scale": "learned"}, {"annealing": Annealing()}], ids=str)
def test_a_dispatch_mode_changes_nothing(options: dict[str, Any]):
    head, x, labels = make("a-softmax", **options)
    twin = copy.deepcopy(head)
    with Pass():
        found = results(head, x, labels)
    wanted = results(twin, x, labels)
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())
    assert head.step.item() == twin.step.item() == int(bool(options.get("annealing")))


def test_the_operation_passes_opcheck():
    head, x, labels = make("a-softmax", scale="learned", annealing="auto")
    scale, given = head.scale.log, (head.fused_spec, head.scale.fixed, True, 0.1, -100, "mean", None)
    settings = fused_head.settings_of(*given, head.annealing, True, False)
    arguments = (x.requires_grad_(), head.weight, scale, labels, head.step, head.eased_in, *settings)
    # Other tests would compare memory between the parts of the state, which has no value.
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.dcnet.head.default, arguments, test_utils=tests)
    with torch.no_grad():
        loss, *saved, _, _ = torch.ops.dcnet.head.default(*arguments)
    arguments = (*arguments[:4], *settings, torch.ones_like(loss), *saved, True, True)
    torch.library.opcheck(torch.ops.dcnet.head_backward.default, arguments, test_utils=tests[:2])


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", ["arcface", "a-softmax", "combined", "sphereface-r"])
def test_large_heads_on_a_gpu(spec: str, dtype: torch.dtype):
    head, x, labels = make(spec, 512, 512, 20_001, annealing="by margin")
    wanted = results(exact(head), x.to(dtype).double(), labels)
    assert_close(results(head, x.to(dtype), labels), wanted, max(1e-5, 2 * torch.finfo(dtype).eps * (x.dtype != dtype)))


@needs_gpu
def test_steps_in_a_cuda_graph():
    head, x, labels = make("a-softmax", 64, 32, 1000, annealing=Annealing(start=3, rate=1, floor=1))
    twin, x = copy.deepcopy(head), x.requires_grad_()
    # All on one stream: torch warns of gradients that come from another stream than those of earlier steps.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.autograd.grad(copy.deepcopy(head)(x, labels), x)
        torch.autograd.grad(head(x, labels), x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            loss = head(x, labels)
            (found,) = torch.autograd.grad(loss, x)
        twin(x, labels)
        for _ in range(3):
            graph.replay()
            wanted = twin(x, labels)
            assert torch.equal(loss, wanted)
            assert torch.equal(found, *torch.autograd.grad(wanted, x))
        stream.synchronize()


@needs_gpu
def test_heads_on_a_gpu_are_fused():
    head, x, labels = make()
    assert fused_head.fits(head, x, labels)
    assert not fused_head.fits(head, x, labels.cpu())
    assert "FusedHead" in type(head(x.requires_grad_(), labels).grad_fn).__name__
    assert not fused_head.fits(exact(head), x, labels)
    assert not fused_head.fits(make("curricularface")[0], x, labels)
    with use_kernels(False):
        assert not fused_head.fits(head, x, labels)


def test_heads_on_a_gpu_are_fused_unless_kernels_are_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    if not ON_GPU:
        # Tensors of the CPU pretend to be on a GPU.
        monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (9, 0))
    assert fused_head.fits(*make())
    with use_kernels(False):
        assert not fused_head.fits(*make())


def test_heads_on_a_cpu_are_not_fused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    head, x, labels = make()
    assert not fused_head.fits(head.cpu(), x.cpu(), labels.cpu())
    assert "FusedHead" not in type(head(x.cpu(), labels.cpu()).grad_fn).__name__
