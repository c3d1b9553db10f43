"""Takes the screenshot of the page for docs/command_line.md with Chromium, from the records in results/."""

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

from dcnet.cli.app import main as dcnet
from dcnet.files import write_atomically

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import chromium

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "images" / "report.png"
WINDOW = (1000, 700)
# The section that is shown, and the pixels above it.
SECTION, ABOVE = "operators", 16
# The positions of the sliders: at the start, several curves coincide.
CONSTANTS = {"beta": 0.2, "rho": 0.6, "k": 0.15}
# A palette shrinks the file to a third; the page has few colors apart from the edges of letters.
COLOURS = 256


def take(file: Path) -> None:
    """Builds the page of all records, and takes a screenshot of the operators section."""
    with tempfile.TemporaryDirectory(prefix="dcnet-page-") as folder, chromium.Chromium() as browser:
        page, shot = Path(folder) / "report.html", Path(folder) / "shot.png"
        if code := dcnet(["report", "--records", str(ROOT / "results"), "--out", str(page)]):
            raise SystemExit(code)
        show(browser, page)
        browser.screenshot(shot)
        write_atomically(file, with_palette(shot.read_bytes()))


def show(browser: chromium.Chromium, page: Path) -> None:
    """Shows the section at the top of the window in light mode, with moved sliders."""
    browser.size(*WINDOW)
    browser.prefer("light")
    browser.call("Emulation.setScrollbarsHidden", hidden=True)
    browser.open(page)
    for name, value in CONSTANTS.items():
        moved = f"(s => {{ s.value = {value}; s.dispatchEvent(new Event('input', {{bubbles: true}})) }})"
        browser.value(f"{moved}(document.getElementById('slider-{name}'))")
    top = f"document.getElementById('{SECTION}').getBoundingClientRect().top"
    browser.value(f"window.scrollTo({{top: window.scrollY + {top} - {ABOVE}, behavior: 'instant'}})")


def with_palette(png: bytes) -> bytes:
    content = io.BytesIO()
    picture = Image.open(io.BytesIO(png)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    picture.save(content, format="png", optimize=True)
    return content.getvalue()


if __name__ == "__main__":
    if chromium.found() is None:
        sys.exit("make screenshot: Chromium is not here: `make browser` installs it")
    take(PICTURE)
    print(f"wrote {PICTURE.relative_to(ROOT)}")
