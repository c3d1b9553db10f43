"""Fixtures of the tests of `dcnet verify`."""

from pathlib import Path

import pytest
from helpers.verify_cases import copied, digit_pairs

from dcnet.report import drawing, roc_plots
from dcnet.training import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return copied(tmp_path / "run")


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    return digit_pairs(tmp_path / "digits")


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables the plots, which test_verify_command.py tests."""
    monkeypatch.setattr(drawing, "save", lambda figure, path: None)
    monkeypatch.setattr(roc_plots, "roc_plot", lambda *arguments: None)
