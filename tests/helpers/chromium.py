"""Headless Chromium, controlled by its DevTools protocol over two pipes, without a driver or package."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)
# Chromium reads from file descriptor 3 and writes to 4; this intermediate process assigns these numbers.
START = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 20) for end in sys.argv[1:3]]
os.dup2(ends[0], 3), os.dup2(ends[1], 4)
os.closerange(5, 64)
os.execv(sys.argv[3], sys.argv[3:])
"""
PATIENCE = 60.0


def found() -> str | None:
    """The path of Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """A browser with one page and a temporary profile."""

    def __init__(self) -> None:
        self.profile = tempfile.TemporaryDirectory(prefix="dcnet-chromium-", ignore_cleanup_errors=True)
        self.count, self.rest, self.events = 0, b"", list[dict[str, Any]]()
        read, self.write = os.pipe()
        self.read, write = os.pipe()
        command = [sys.executable, "-c", START, str(read), str(write), str(found()), *OPTIONS]
        self.process = subprocess.Popen(
            [*command, f"--user-data-dir={self.profile.name}", "about:blank"],
            pass_fds=(read, write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read)
        os.close(write)
        self.session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Chromium":
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)
        os.close(self.read)
        os.close(self.write)
        self.profile.cleanup()

    def call(self, method: str, **parameters: Any) -> Any:
        """Sends a command and returns its answer; events that arrive meanwhile are kept."""
        self.count += 1
        message: dict[str, Any] = {"id": self.count, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self.count:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self.rest:
            if not select.select([self.read], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError("Chromium does not answer")
            part = os.read(self.read, 1 << 16)
            if not part:
                raise RuntimeError("Chromium has ended")
            self.rest += part
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def open(self, path: Path) -> None:
        self.call("Page.navigate", url=path.resolve().as_uri())
        end = time.monotonic() + PATIENCE
        while self.value("document.readyState") != "complete" or self.value("location.href") == "about:blank":
            assert time.monotonic() < end, "the page does not load"
            time.sleep(0.05)

    def size(self, width: int, height: int) -> None:
        """Sets the size of the window; a narrow one is that of a phone."""
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def prefer(self, scheme: str) -> None:
        """Sets the light or dark color scheme, and reduced motion, so that nothing moves during a click."""
        wanted = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
        features = [{"name": name, "value": value} for name, value in wanted.items()]
        self.call("Emulation.setEmulatedMedia", features=features)

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str, code: int) -> None:
        """Presses a key in the focused element."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def click(self, selector: str) -> None:
        """Clicks in the middle of the first element that matches."""
        one = f"document.querySelector({selector!r})"
        self.value(f"{one}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        # Wait for two frames, until the layout is stable.
        frames = "new Promise(then => requestAnimationFrame(() => requestAnimationFrame(then)))"
        middle = f"(b => [b.x + b.width / 2, b.y + b.height / 2])({one}.getBoundingClientRect())"
        x, y = self.value(f"{frames}.then(() => {middle})")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, path: Path, whole: bool = False) -> None:
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))

    def complaints(self) -> list[str]:
        """Console messages and exceptions."""
        self.call("Runtime.evaluate", expression="0")
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        return [json.dumps(event["params"])[:500] for event in self.events if event["method"] in kinds]

    def requests(self) -> list[str]:
        """The addresses of all requests, without data URLs."""
        sent = [event["params"] for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [one["request"]["url"] for one in sent if not one["request"]["url"].startswith("data:")]


# Marks tests that need a browser.
NEEDED = pytest.mark.skipif(found() is None, reason="Chromium is not installed: `make browser`")
