import dataclasses
import functools
import itertools
import os
import signal
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

# Without a GPU the kernels run in Triton's interpreter, which must be enabled before Triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Triton 3.9 and newer warn if this is unset, since its default will change, and a warning is an error here.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import dcnet
from dcnet.models.timm_models import import_timm

# The workers of pytest-xdist share the cores: more threads would slow each other down.
torch.set_num_threads(1)

settings.register_profile("dcnet", deadline=None, max_examples=100, derandomize=True)
settings.load_profile("dcnet")


@pytest.fixture(autouse=True, scope="session")
def _signals_enabled() -> Iterator[None]:
    """Enables SIGINT and SIGTERM here and in child processes: `nohup` and background jobs may ignore them."""
    before = {signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler)}
    before[signal.SIGTERM] = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _exact_convolutions() -> Iterator[None]:
    """Deterministic convolutions in float32 instead of TF32, which has three digits; matters only on a GPU."""
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield


@pytest.fixture(params=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def pairwise(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """A few combinations of values, one per axis, that cover every pair of values of any two axes."""
    combinations = {each: set(itertools.combinations(enumerate(each), 2)) for each in itertools.product(*axes)}
    uncovered, chosen = set().union(*combinations.values()), []
    while uncovered:
        chosen.append(max(combinations, key=lambda each: len(combinations[each] & uncovered)))
        uncovered -= combinations[chosen[-1]]
    return chosen


def combination_params(*axes: Iterable[Any]) -> list[Any]:
    """All combinations of values as test parameters; those that are not pairwise are marked slow."""
    quick, lists = set(pairwise(*axes)), [list(axis) for axis in axes]
    return [
        pytest.param(*each, id="-".join(map(str, each)), marks=[] if each in quick else pytest.mark.slow)
        for each in itertools.product(*lists)
    ]


def _spec(magnitude: str, angle: str, weighting: str) -> str:
    return f"{magnitude}-{angle}" + ("" if weighting == "unweighted" else f"+{weighting}")


@functools.cache
def all_operators() -> tuple[str, ...]:
    """Every magnitude x angle x weighting of the registries, with default constants."""
    names = itertools.product(dcnet.magnitude.registry, dcnet.angle.registry, dcnet.weighting.registry)
    return tuple(_spec(*each) for each in names)


@functools.cache
def pairwise_operators() -> tuple[str, ...]:
    """Operators that cover every pair of magnitude, angle and weighting."""
    names = pairwise(dcnet.magnitude.registry, dcnet.angle.registry, dcnet.weighting.registry)
    return tuple(_spec(*each) for each in names)


def operator_params(specs: Iterable[str] | None = None) -> list[Any]:
    """Specs, all operators by default, as test parameters; those that are not pairwise are marked slow."""
    quick = set(pairwise_operators())
    chosen = all_operators() if specs is None else specs
    return [pytest.param(spec, id=spec, marks=[] if spec in quick else pytest.mark.slow) for spec in chosen]


def fixed_radius(operator: str, radius: float) -> dcnet.Operator:
    """The operator with its radius, if it has one, replaced by a fixed, absolute one."""
    op = dcnet.Operator.parse(operator)
    if op.decay is None:
        return op
    return dcnet.Operator(dataclasses.replace(op.magnitude, radius=radius), op.angle, op.weighting)


def timm_or_skip() -> Any:
    """The package timm; skips the calling module or test if it is not installed."""
    try:
        return import_timm()
    except ModuleNotFoundError as error:
        pytest.skip(str(error), allow_module_level=True)
