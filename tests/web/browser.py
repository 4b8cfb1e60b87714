"""A real browser for the tests of the page, and for its pictures: Debian's Chromium, driven through chromedriver."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

ROOT = Path(__file__).parents[2]
AXE = ROOT / "out/look/axe/package/axe.min.js"
CLI = [sys.executable, "-m", "holdfast.cli"]
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --force-device-scale-factor=1"
)


_ALL_THERE = "return [...holdfast.wanted.keys()].every(k => k in holdfast.panels || k in holdfast.errors)"


class Browser:
    """One browser with a profile of its own. `close` ends it."""

    def __init__(self, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self._profile = tempfile.TemporaryDirectory()
        options = webdriver.ChromeOptions()
        options.binary_location = "/usr/bin/chromium"
        for flag in (*_FLAGS.split(), f"--user-data-dir={self._profile.name}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))
        # What its own first tab asked for is not the page's.
        self.driver.get("about:blank")
        self.requests()
        self.size(width, height)
        self.dark(dark)

    def size(self, width: int, height: int) -> None:
        given = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", given)

    def dark(self, dark: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def run(self, script: str, *given: Any) -> Any:
        return self.driver.execute_script(script, *given)

    def key(self, name: str) -> None:
        """One that a person presses."""
        ActionChains(self.driver).send_keys(getattr(Keys, name.upper())).perform()

    def wait(self, script: str, limit_s: float = 30.0) -> Any:
        """Until a script gives something true; what it gave."""
        return until(lambda: self.run(script), limit_s, script)

    def open(self, url: str) -> None:
        self.driver.get(url)
        self.wait("return window.holdfast && window.holdfast.now && document.querySelector('h1')")

    def view(self, address: str) -> None:
        self.run(f"location.hash = {json.dumps(address)}")
        # Drawn with everything that it asks for, and nothing on its way.
        self.wait(
            "return [...document.querySelectorAll('.logged')].every("
            "e => e.querySelector('.uplot') || e.getBoundingClientRect().top > innerHeight)"
        )
        self.wait(_ALL_THERE)
        self.wait(
            "return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
        )

    def requests(self) -> list[str]:
        """Addresses that were asked for since the last call."""
        found = []
        for line in self.driver.get_log("performance"):
            message = json.loads(line["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        return found

    def complaints(self) -> list[str]:
        """What the browser wrote to its console as an error, since the last call."""
        return [line["message"] for line in self.driver.get_log("browser") if line["level"] == "SEVERE"]

    def picture(self, path: Path, most: int = 1600) -> None:
        """The page as it is, down to `most` pixels."""
        width, height = self.run("return [innerWidth, document.documentElement.scrollHeight]")
        self.size(width, min(most, height))
        # What comes into sight with the new size is asked for now.
        self.wait(
            "return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
        )
        self.wait(_ALL_THERE)
        self.wait(
            "return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
        )
        path.write_bytes(base64.b64decode(self.driver.get_screenshot_as_base64()))

    def findings(self) -> list[str]:
        """What axe finds that is serious or critical."""
        self.run(AXE.read_text())
        found = self.driver.execute_async_script(
            "const done = arguments[0]; axe.run(document, {resultTypes: ['violations']}).then(r => done(r.violations))"
        )
        return [
            f"{v['id']} ({v['impact']}): {v['help']}: {[n['html'][:160] for n in v['nodes'][:3]]}"
            for v in found
            if v["impact"] in ("serious", "critical")
        ]

    def close(self) -> None:
        self.driver.quit()
        self._profile.cleanup()


def until(what: Callable[[], Any], limit_s: float, why: str) -> Any:
    deadline = time.monotonic() + limit_s
    while not (found := what()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {limit_s} s: {why}")
        time.sleep(0.05)
    return found


@contextmanager
def ui(home: Path, *options: str) -> Iterator[str]:
    """`holdfast ui` on a free port; gives its link."""
    with _serving(home, "ui", *options) as link:
        yield link


@contextmanager
def simulated(home: Path, *options: str) -> Iterator[str]:
    """`holdfast plan simulate --page` on a free port; gives its link."""
    with _serving(home, "plan", "simulate", "--page", *options) as link:
        yield link


@contextmanager
def _serving(home: Path, *words: str) -> Iterator[str]:
    command = [*CLI, *words, "--port", "0"]
    environment = os.environ | {"HOLDFAST_HOME": str(home)}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            found = (re.search(r"page: (\S+)", line) for line in process.stdout)
            yield next(match[1] for match in found if match)
        finally:
            process.terminate()
            process.wait()
