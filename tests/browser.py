"""Headless Chromium, driven through chromedriver's HTTP interface: nothing to install beside it."""

import base64
import json
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@dataclass(frozen=True)
class Browser:
    """A session with one page."""

    address: str

    def call(self, path: str, **body: Any) -> Any:
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.address}/{path}", data, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def call_get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.address}/{path}", timeout=60) as answer:
            return json.load(answer)["value"]

    def develop(self, command: str, **parameters: Any) -> Any:
        """A command of the developer tools' protocol."""
        return self.call("goog/cdp/execute", cmd=command, params=parameters)

    def open(self, page: Path | str, width: int, *, dark: bool = False) -> None:
        """A file, or an address."""
        self.resize(width, 900)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.develop("Emulation.setEmulatedMedia", features=[scheme])
        self.call("url", url=page.as_uri() if isinstance(page, Path) else page)

    def resize(self, width: int, height: int) -> None:
        self.develop(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def run(self, script: str) -> Any:
        """What ``script`` returns in the page."""
        return self.call("execute/sync", script=script, args=[])

    def until(self, script: str, seconds: float = 30) -> Any:
        """What ``script`` returns in the page, as soon as that is something."""
        end = time.monotonic() + seconds
        while not (found := self.run(script)):
            if time.monotonic() > end:
                raise AssertionError(f"The page never came to: {script}")
            time.sleep(0.05)
        return found

    def find(self, selector: str) -> str:
        """The path of an element, to be followed by ``/click`` and the like."""
        self.until(f"return document.querySelector({json.dumps(selector)}) !== null")
        found = self.call("element", using="css selector", value=selector)
        return f"element/{next(iter(found.values()))}"

    def click(self, selector: str) -> None:
        self.run(
            f"document.querySelector({json.dumps(selector)})?.scrollIntoView({{block: 'center'}})"
        )
        self.call(f"{self.find(selector)}/click")

    def type(self, selector: str, text: str) -> None:
        """Keys for an element; the paths of files for one that takes files."""
        self.call(f"{self.find(selector)}/value", text=text)

    def press(self, key: str) -> None:
        """A key for whatever has the focus; special ones by their code point in WebDriver."""
        strokes = [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        self.act({"type": "key", "id": "keys", "actions": strokes})

    def drag(self, selector: str, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Draws with the mouse between two places of an element, as shares of its size."""
        edge = self.run(
            f"const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'});"
            "const r = e.getBoundingClientRect(); return [r.x, r.y, r.width, r.height];"
        )
        places = [
            {
                "type": "pointerMove",
                "x": round(edge[0] + x * edge[2]),
                "y": round(edge[1] + y * edge[3]),
            }
            for x, y in (start, end)
        ]
        down, up = ({"type": kind, "button": 0} for kind in ("pointerDown", "pointerUp"))
        moves = [places[0], down, places[1], up]
        self.act({"type": "pointer", "id": "mouse", "actions": moves})

    def act(self, source: dict[str, Any]) -> None:
        self.call("actions", actions=[source])

    def logged(self, kind: str) -> list[dict[str, Any]]:
        """Entries of a log since it was last read: "browser" is the console."""
        return self.call("se/log", type=kind)

    def requests(self) -> list[str]:
        """Addresses asked for since this was last called."""
        messages = [json.loads(entry["message"])["message"] for entry in self.logged("performance")]
        return [
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        ]

    def screenshot(self, path: Path) -> None:
        shot = self.develop("Page.captureScreenshot")
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browser() -> Iterator[Browser]:
    """Starts Chromium, and ends it."""
    driver, chromium = shutil.which("chromedriver"), shutil.which("chromium")
    assert driver and chromium, (
        "Chromium and its driver are missing: install both (chromium-driver)."
    )
    with tempfile.TemporaryDirectory() as profile:
        log = Path(profile, "port.txt")
        with log.open("w") as output:
            process = subprocess.Popen([driver, "--port=0"], stdout=output, stderr=output)
        try:
            root = f"http://127.0.0.1:{_port(log)}/session"
            options = {
                "binary": chromium,
                "args": [*FLAGS, f"--user-data-dir={profile}/profile"],
            }
            wanted = {
                "browserName": "chrome",
                "goog:chromeOptions": options,
                "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
            }
            starter = Browser(root.removesuffix("/session"))
            session = starter.call("session", capabilities={"alwaysMatch": wanted})["sessionId"]
            try:
                yield Browser(f"{root}/{session}")
            finally:
                _quit(f"{root}/{session}")
        finally:
            process.terminate()
            process.wait(timeout=30)


def _quit(address: str) -> None:
    with urllib.request.urlopen(urllib.request.Request(address, method="DELETE"), timeout=60):
        pass


def _port(log: Path) -> int:
    """Where the driver listens, which it chooses and prints."""
    for _ in range(300):
        words = log.read_text().replace(".", " ").split()
        if "successfully" in words and words[-1].isdecimal():
            return int(words[-1])
        time.sleep(0.1)
    raise AssertionError(f"chromedriver did not start: {log.read_text()}")
