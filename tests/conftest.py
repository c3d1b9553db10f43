import dataclasses
import os
import signal
from collections.abc import Iterator
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
from dcnet.models.timm_import import import_timm

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


def all_operators() -> list[str]:
    """Every magnitude x angle x weighting of the registries, with what is learned by default."""
    return [
        f"{magnitude}-{angle}" + ("" if weighting == "unweighted" else f"+{weighting}")
        for magnitude in dcnet.magnitude.registry
        for angle in dcnet.angle.registry
        for weighting in dcnet.weighting.registry
    ]


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
