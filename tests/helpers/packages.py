"""Optional packages that tests need."""

from typing import Any

import pytest

from dcnet.models.timm_models import import_timm


def timm_or_skip() -> Any:
    """The package timm; skips the calling module or test if it is not installed."""
    try:
        return import_timm()
    except ModuleNotFoundError as error:
        pytest.skip(str(error), allow_module_level=True)
