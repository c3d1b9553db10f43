"""The page in a browser: sliders, dark mode and disclosures on a desktop and on a phone, without errors.

With DCNET_SHOTS=FOLDER the screenshots are kept there.
"""

import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import chromium
from helpers.page_records import a_run, features, put, real_page

from dcnet import Operator, angle, magnitude
from dcnet.report.page import Sources, page

pytestmark = chromium.NEEDED
DESK, PHONE = (1200, 900), (390, 844)
CONSTANTS = {"alpha": 1.3, "beta": 0.4, "rho": 0.7, "k": 0.2, "q": 0.3}


@pytest.fixture(scope="module")
def browser() -> Iterator[chromium.Chromium]:
    with chromium.Chromium() as found:
        yield found


@pytest.fixture
def opened(browser: chromium.Chromium, tmp_path: Path) -> chromium.Chromium:
    """The page of the repository's records, in light mode on a desktop."""
    (tmp_path / "report.html").write_text(real_page())
    browser.events.clear()
    browser.size(*DESK)
    browser.prefer("light")
    browser.open(tmp_path / "report.html")
    browser.value("localStorage.clear(); delete document.documentElement.dataset.theme")
    return browser


@pytest.fixture
def shots(tmp_path: Path) -> Path:
    folder = Path(os.environ.get("DCNET_SHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def path_of(browser: chromium.Chromium, part: str) -> Any:
    """The points of a curve, for comparison up to rounding."""
    text = browser.value(f"document.querySelector('#chart-magnitudes [data-part={part}] path').getAttribute('d')")
    return pytest.approx([float(number) for number in re.split("[ ML]", text)[1:]], abs=0.15)


def test_slider_moves_the_curves_with_its_constant(opened: chromium.Chromium):
    before = {part: path_of(opened, part) for part in ("tanh", "linear", "sharp")}
    opened.value("document.getElementById('slider-rho').focus()")
    for _ in range(5):
        opened.press("ArrowRight", 39)
    assert opened.value("document.querySelector('output[for=slider-rho]').textContent") == "1.25"
    after = {part: path_of(opened, part) for part in before}
    assert [after[part].expected == before[part] for part in before] == [False, True, True]
    opened.click("[data-reset]")
    assert path_of(opened, "tanh").expected == before["tanh"]
    assert opened.complaints() == []


def test_javascript_formulas_match_the_library(opened: chromium.Chromium):
    norms, angles = [0.1 * i for i in range(31)], [math.pi * i / 30 for i in range(31)]
    table = "(table, at) => Object.fromEntries(Object.entries(table).map(([name, f]) => [name, at.map(x => f(x, c))]))"
    shown = opened.value(
        f"(c => {{ const all = {table}; const own = dcnetOperators; "
        f"return {{h: all(own.magnitudes, {norms}), g: all(own.angles, {angles})}} }})({json.dumps(CONSTANTS)})"
    )
    assert shown["h"].keys() == magnitude.registry.keys()
    assert shown["g"].keys() == angle.registry.keys() - {"spline"}
    settings = {"scale": 1.3, "slope": 0.4, "log_scale": 0.4, "radius": 0.7, "k": 0.2, "offset": 0.3}
    for name, values in shown["h"].items():
        op = parsed(f"{name}-cos", name, settings)
        expected = op.h(torch.tensor(norms, dtype=torch.float64), op.constants({}))
        assert values == pytest.approx(expected.tolist(), abs=1e-9), name
    for name, values in shown["g"].items():
        op = parsed(f"sphere-{name}", name, settings)
        expected = op.g(torch.tensor(angles, dtype=torch.float64).cos(), op.constants({}))
        assert values == pytest.approx(expected.tolist(), abs=1e-6), name


def parsed(spec: str, name: str, settings: dict[str, float]) -> Operator:
    """The operator, with all constants of this part fixed."""
    op = Operator.parse(spec)
    part = op.magnitude if spec.startswith(name) else op.angle
    own = ",".join(f"{key}={settings[key]}" for key in part.slots())
    return Operator.parse(spec.replace(name, f"{name}({own})", 1) if own else spec)


def test_theme_button_switches_between_light_and_dark(opened: chromium.Chromium, shots: Path):
    ground = "getComputedStyle(document.body).backgroundColor"
    light = opened.value(ground)
    opened.screenshot(shots / "light.png")
    opened.click("#theme")
    assert opened.value("document.getElementById('theme').getAttribute('aria-pressed')") == "true"
    dark = opened.value(ground)
    assert dark != light
    opened.screenshot(shots / "dark.png")
    opened.click("#theme")
    assert opened.value(ground) == light
    opened.value("delete document.documentElement.dataset.theme")
    opened.prefer("dark")
    assert opened.value(ground) == dark
    assert opened.complaints() == []


def test_click_on_a_number_shows_its_command(opened: chromium.Chromium):
    number = "#tables details.number:not(.missing)"
    hidden = f"!document.querySelector('{number} code').checkVisibility()"
    assert opened.value(hidden)
    opened.click(f"{number} summary")
    assert not opened.value(hidden)
    assert opened.value(f"document.querySelector('{number} code').innerText").startswith("dcnet train")
    opened.value(f"document.querySelector('{number} summary').focus()")
    opened.press("Enter", 13)
    assert opened.complaints() == []


def test_legend_hides_a_line_and_the_reader_reads_the_others(opened: chromium.Chromium):
    figure = "#chart-figure4"
    output = f"document.querySelector('{figure} output').textContent"
    name = opened.value(f"document.querySelector('{figure} .legend button').textContent")
    assert name.startswith("conv")
    assert f"{name}: " in opened.value(output)
    opened.click(f"{figure} .legend button")
    assert f"{name}: " not in opened.value(output)
    seen = f"getComputedStyle(document.querySelector('{figure} .series[data-series=\"0\"]')).visibility"
    assert opened.value(seen) == "hidden"
    opened.click(f"{figure} .legend button")
    assert opened.value(seen) == "visible"
    opened.value(f"document.querySelector('{figure} [data-reader]').focus()")
    opened.press("Home", 36)
    assert opened.value(output).startswith("step 390 ")
    assert opened.complaints() == []


@pytest.mark.parametrize("everything_open", [False, True])
def test_page_does_not_scroll_sideways_on_a_phone(opened: chromium.Chromium, shots: Path, everything_open: bool):
    opened.size(*PHONE)
    if everything_open:
        opened.value("for (const one of document.querySelectorAll('details')) one.open = true")
    assert opened.value("document.documentElement.scrollWidth") == PHONE[0]
    wide = """[...document.querySelectorAll('body *')].filter(one => !one.closest('.scroll') && !one.closest('svg')
      && one.checkVisibility() && one.getBoundingClientRect().right > innerWidth + 1).map(one => one.outerHTML)"""
    assert opened.value(wide) == []
    small = "[...document.querySelectorAll('.chart text')].filter(one => one.getBoundingClientRect().height < 9).length"
    assert opened.value(small) == 0
    opened.screenshot(shots / "phone.png")


@pytest.mark.parametrize("width", [320, 390])
def test_commands_are_readable_beside_run_names_on_a_phone(opened: chromium.Chromium, width: int):
    """The first cell of a row may be sticky, unless it hides the others."""
    opened.size(width, PHONE[1])
    box = "document.querySelector('#records .scroll')"
    opened.value(f"(box => {{ box.scrollLeft = box.querySelector('td > code').parentElement.offsetLeft }})({box})")
    seen = """(box => { const room = box.getBoundingClientRect();
      const cell = box.querySelector('td > code').getBoundingClientRect();
      const name = box.querySelector('tbody th').getBoundingClientRect();
      return Math.min(cell.right, room.right) - Math.max(cell.left, room.left, name.right) - cell.width })"""
    assert opened.value(f"{seen}({box})") == pytest.approx(0, abs=1)


def test_keyboard_starts_at_the_skip_link_with_visible_focus(opened: chromium.Chromium):
    opened.press("Tab", 9)
    assert opened.value("document.activeElement.className") == "skip"
    assert opened.value("document.activeElement.getBoundingClientRect().left") >= 0
    opened.press("Tab", 9)
    assert opened.value("document.activeElement.id") == "theme"
    assert opened.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_page_makes_no_network_requests(opened: chromium.Chromium):
    assert all(address.startswith("file:") for address in opened.requests())
    assert len(opened.requests()) == 1


def test_small_epsilon_is_not_shown_as_zero(browser: chromium.Chromium, tmp_path: Path):
    card = {"by_epsilon": {"epsilons": [0.0, 0.5 / 8 / 255, 8 / 255], "accuracies": [0.9, 0.8, 0.5]}}
    put(tmp_path / "some", "run", a_run(evaluations={"card": card}))
    (tmp_path / "page.html").write_text(page(Sources((tmp_path / "some",))))
    browser.open(tmp_path / "page.html")
    shown = []
    for place in range(3):
        moved = f"(s => {{ s.value = {place}; s.dispatchEvent(new Event('input')) }})"
        browser.value(f"{moved}(document.querySelector('#robustness [data-reader]'))")
        shown.append(browser.value("document.querySelector('#robustness output').textContent").split(" \u2013 ")[0])
    assert shown == ["epsilon 0", "epsilon 0.0002451", "epsilon 0.03137"]


def test_print_shows_notes_no_larger_than_numbers(opened: chromium.Chromium):
    opened.call("Emulation.setEmulatedMedia", media="print")
    size = "parseFloat(getComputedStyle(document.querySelector('#tables td {}')).fontSize)"
    assert opened.value(size.format("> .paper")) <= opened.value(size.format(".number > summary"))
    opened.call("Emulation.setEmulatedMedia", media="")


def test_page_of_synthetic_records_fits_a_phone(browser: chromium.Chromium, tmp_path: Path):
    card = {"by_epsilon": {"epsilons": [0.0, 0.1], "accuracies": [0.9, 0.25]}}
    once = a_run(evaluations={"card": card})
    once["curves"] = {name: values[:1] for name, values in once["curves"].items()}
    put(tmp_path / "some", "run", once)
    put(tmp_path / "some", "flat", features(2))
    put(tmp_path / "some", "solid", features(3))
    (tmp_path / "page.html").write_text(page(Sources((tmp_path / "some",))))
    browser.events.clear()
    browser.size(*PHONE)
    browser.open(tmp_path / "page.html")
    assert browser.value("document.querySelectorAll('#features svg.chart').length") == 2
    assert "90.00" in browser.value("document.querySelector('#robustness').textContent")
    dot = "document.querySelector('#chart-digits-cnn9-small circle').getBoundingClientRect().width"
    assert browser.value(dot) > 3
    assert browser.value("document.documentElement.scrollWidth") == PHONE[0]
    assert browser.complaints() == []


def test_long_run_names_wrap_on_a_phone(browser: chromium.Chromium, tmp_path: Path):
    record = a_run()
    for operator in ("tanh-cos", f"long({'a' * 200})-cos"):
        config = record["config"] | {"operator": operator}
        put(tmp_path / "some", operator[:4], record | {"config": config, "hash": operator[:4]})
    (tmp_path / "page.html").write_text(page(Sources((tmp_path / "some",))))
    browser.size(*PHONE)
    browser.open(tmp_path / "page.html")
    assert "aaa" in browser.value("document.querySelector('#curves output').textContent")
    assert browser.value("document.documentElement.scrollWidth") == PHONE[0]
