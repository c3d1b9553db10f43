"""Settings and fixtures of all tests."""

import os
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# Without a GPU the kernels run in Triton's interpreter, which must be enabled before Triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Triton 3.9 and newer warn if this is unset, since its default will change, and a warning is an error here.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

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
