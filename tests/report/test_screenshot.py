"""The screenshot of the page in README, which `make screenshot` takes."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import screenshot
from helpers import chromium
from helpers.page_records import real_page
from PIL import Image


@pytest.fixture
def browser() -> Iterator[chromium.Chromium]:
    with chromium.Chromium() as found:
        yield found


@chromium.NEEDED
def test_screenshot_shows_moved_sliders_and_both_charts(browser: chromium.Chromium, tmp_path: Path):
    (tmp_path / "report.html").write_text(real_page())
    screenshot.show(browser, tmp_path / "report.html")
    for name, value in screenshot.CONSTANTS.items():
        assert float(browser.value(f"document.querySelector('output[for=slider-{name}]').textContent")) == value
    for part in ("#operators-heading", "#slider-rho", "#chart-magnitudes path"):
        top = browser.value(f"document.querySelector('{part}').getBoundingClientRect().top")
        assert 0 < top < screenshot.WINDOW[1], part
    assert browser.value("window.innerWidth - document.documentElement.clientWidth") == 0, "a scroll bar is in sight"
    assert browser.complaints() == []


@chromium.NEEDED
def test_screenshot_has_the_size_of_the_one_in_the_docs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    screenshot.take(tmp_path / "report.png")
    with Image.open(tmp_path / "report.png") as taken, Image.open(screenshot.PICTURE) as shown:
        assert taken.size == shown.size == screenshot.WINDOW
        assert len(taken.convert("RGB").getcolors(maxcolors=1000)) > 50


def test_make_screenshot_runs_the_script():
    rule = re.search(r"^screenshot:.*\n\t(.*)$", (screenshot.ROOT / "Makefile").read_text(), re.MULTILINE)
    assert rule is not None
    assert rule[1] == "$(RUN) tests/report/screenshot.py"
