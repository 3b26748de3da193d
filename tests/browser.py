"""A headless Chromium, driven over a pipe: sizes, colour schemes, console messages, screenshots. No package needed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell")
SECONDS = 60


def browser_path() -> str | None:
    """The first Chromium on the path, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a browser; a context manager that ends it.

    `messages` collects what scripts print and what the browser complains about.
    """

    def __init__(self, path: str) -> None:
        self.profile = tempfile.mkdtemp()
        to_read, self.to_browser = os.pipe()
        self.from_browser, to_write = os.pipe()
        # The browser reads from 3 and writes to 4; a shell moves the ends of the pipes there.
        options = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --hide-scrollbars"
        script = f'exec "$0" {options} --user-data-dir="$1" --remote-debugging-pipe 3<&{to_read} 4>&{to_write}'
        self.process = subprocess.Popen(
            ["bash", "-c", script, path, self.profile], pass_fds=(to_read, to_write), stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        self.rest = b""
        self.number = 0
        self.session: str | None = None
        self.messages: list[str] = []
        self.loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.session = None
            self.call("Browser.close")
            self.process.wait(10)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        for end in (self.to_browser, self.from_browser):
            os.close(end)
        shutil.rmtree(self.profile, ignore_errors=True)

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """One command, and its result; events that arrive meanwhile are noted."""
        self.number += 1
        command: dict[str, Any] = {"id": self.number, "method": method, "params": arguments}
        if self.session is not None:
            command["sessionId"] = self.session
        os.write(self.to_browser, json.dumps(command).encode() + b"\0")
        for message in self._read():
            if message.get("id") == self.number:
                assert "error" not in message, f"{method}: {message['error']}"
                result: dict[str, Any] = message["result"]
                return result
        raise OSError("the browser has ended")

    def _read(self) -> Iterator[dict[str, Any]]:
        while True:
            while b"\0" not in self.rest:
                part = os.read(self.from_browser, 1 << 16)
                if not part:
                    return
                self.rest += part
            text, _, self.rest = self.rest.partition(b"\0")
            message = json.loads(text)
            self._note(message)
            yield message

    def _note(self, message: dict[str, Any]) -> None:
        method, given = message.get("method"), message.get("params", {})
        if method == "Runtime.consoleAPICalled":
            self.messages.append(" ".join(str(a.get("value")) for a in given["args"]))
        elif method == "Runtime.exceptionThrown":
            self.messages.append(str(given["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.messages.append(given["entry"]["text"])
        elif method == "Page.loadEventFired":
            self.loaded = True

    def open(self, path: Path, width: int, height: int = 900, dark: bool = False, media: str = "screen") -> None:
        """Show a file in a window of that size."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.loaded = False
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not self.loaded:
            next(self._read())

    def scripts(self, allowed: bool) -> None:
        """Whether scripts of pages run."""
        self.call("Emulation.setScriptExecutionDisabled", value=not allowed)

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def screenshot(self, path: Path, whole: bool = True, height: int | None = None) -> None:
        """A picture of the page, whole or down to a height."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": 1}
        given = {"clip": clip, "captureBeyondViewport": True} if whole or height else {}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", **given)["data"]))


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser for one test."""
    path = browser_path()
    assert path is not None
    with Browser(path) as opened:
        yield opened
