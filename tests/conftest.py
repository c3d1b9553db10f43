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

# Without a GPU the kernels run in Triton's interpreter, which has to be asked for before Triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Triton 3.9 and newer warn where this is unset, since its default will change, and a warning is an error here.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import dcnet
from dcnet.models.timm_models import import_timm

# The workers of pytest-xdist share the cores: more threads than that only get in each other's way.
torch.set_num_threads(1)

settings.register_profile("dcnet", deadline=None, max_examples=100, derandomize=True)
settings.load_profile("dcnet")


@pytest.fixture(autouse=True, scope="session")
def _signals_are_heard() -> Iterator[None]:
    """Here and in all processes that tests start, though `nohup` and shells switch some off in the background."""
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
    """Not in TF32, which has three digits, and the same each time; both only matter on a GPU."""
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield


@pytest.fixture(params=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def pairwise(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """The combinations of values, one of each axis, that cover every pair of values of two axes; few, not fewest."""
    combinations = {each: set(itertools.combinations(enumerate(each), 2)) for each in itertools.product(*axes)}
    uncovered, chosen = set().union(*combinations.values()), []
    while uncovered:
        chosen.append(max(combinations, key=lambda each: len(combinations[each] & uncovered)))
        uncovered -= combinations[chosen[-1]]
    return chosen


def combination_params(*axes: Iterable[Any]) -> list[Any]:
    """All combinations of values as parameters of a test; those that are not pairwise are slow."""
    quick, lists = set(pairwise(*axes)), [list(axis) for axis in axes]
    return [
        pytest.param(*each, id="-".join(map(str, each)), marks=[] if each in quick else pytest.mark.slow)
        for each in itertools.product(*lists)
    ]


def _spec(magnitude: str, angle: str, weighting: str) -> str:
    return f"{magnitude}-{angle}" + ("" if weighting == "unweighted" else f"+{weighting}")


@functools.cache
def all_operators() -> tuple[str, ...]:
    """Every magnitude x angle x weighting of the registries, with the constants learned that are by default."""
    names = itertools.product(dcnet.magnitude.registry, dcnet.angle.registry, dcnet.weighting.registry)
    return tuple(_spec(*each) for each in names)


@functools.cache
def pairwise_operators() -> tuple[str, ...]:
    """Operators that cover every pair of magnitude, angle and weighting."""
    names = pairwise(dcnet.magnitude.registry, dcnet.angle.registry, dcnet.weighting.registry)
    return tuple(_spec(*each) for each in names)


def operator_params(specs: Iterable[str] | None = None) -> list[Any]:
    """Specs, all operators by default, as parameters of a test; those that are not pairwise are slow."""
    quick = set(pairwise_operators())
    chosen = all_operators() if specs is None else specs
    return [pytest.param(spec, id=spec, marks=[] if spec in quick else pytest.mark.slow) for spec in chosen]


def fixed_radius(operator: str, radius: float) -> dcnet.Operator:
    """The same operator with an absolute, fixed radius, where it has one."""
    op = dcnet.Operator.parse(operator)
    if op.decay is None:
        return op
    return dcnet.Operator(dataclasses.replace(op.magnitude, radius=radius), op.angle, op.weighting)


def timm_or_skip() -> Any:
    """timm as dcnet imports it; without it the calling module or test is skipped."""
    try:
        return import_timm()
    except ModuleNotFoundError as error:
        pytest.skip(str(error), allow_module_level=True)
