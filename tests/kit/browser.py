"""Debian's Chromium, headless, for tests that look at a page. It is downloaded by nobody and reaches loopback only."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

CHROMIUM = "/usr/bin/chromium"
DRIVER = "/usr/bin/chromedriver"
WAIT_S = 30.0
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # which root cannot have
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--no-proxy-server",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


class Browser:
    """One window. What it asked for and complained of is kept."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self._driver = driver

    def open(self, url: str) -> None:
        self._driver.get(url)

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a function's body in the page."""
        return self._driver.execute_script(script, *arguments)

    def text(self, selector: str) -> str:
        """What a reader sees of the first element that matches, spaces made one."""
        found: str = self.run("return document.querySelector(arguments[0]).innerText", selector)
        return " ".join(found.split())

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Until `condition` holds."""
        deadline_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline_s, f"it never came: {what}; the page says {self.text('body')}"
            time.sleep(0.1)

    def resize(self, width: int, height: int) -> None:
        """The page's size in pixels; narrower than a window can be, too."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def prefer(self, scheme: str) -> None:
        """What `prefers-color-scheme` is."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def save_picture(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        assert self._driver.save_screenshot(str(path))

    def complaints(self) -> list[str]:
        """What came to the console since the last call, and was no mere remark."""
        return [line["message"] for line in self._driver.get_log("browser") if line["level"] in ("WARNING", "SEVERE")]

    def hosts(self) -> set[str]:
        """Of all that was asked for by pages since the last call."""
        events = (json.loads(line["message"])["message"] for line in self._driver.get_log("performance"))
        urls = (event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent")
        return {urlsplit(url).netloc for url in urls if not url.startswith(("data:", "chrome:"))}


@contextmanager
def browser() -> Iterator[Browser]:
    """A new window with a profile of its own."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in _FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
