"""Headless Chromium, driven over a pipe in its own protocol: nothing else is needed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe"),
)


def find_chromium() -> str | None:
    """The program, if this machine has it."""
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )


class Chromium:
    """One page."""

    def __init__(self, program: str, profile: Path) -> None:
        theirs_in, self._in = os.pipe()
        self._out, theirs_out = os.pipe()

        def place() -> None:  # the browser looks for the pipes at 3 and 4; the first copies are out of their way
            for number, copy in ((theirs_in, 40), (theirs_out, 41), (40, 3), (41, 4)):
                os.dup2(number, copy)

        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=place,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in), os.close(theirs_out)
        self._number, self._rest, self._session, self.events = 0, b"", "", list[Any]()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(1280, 800)

    def call(self, method: str, **parameters: Any) -> Any:
        """Ask the browser for something."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        os.write(
            self._in,
            json.dumps({**message, **({"sessionId": self._session} if self._session else {})}).encode() + b"\0",
        )
        while True:
            while b"\0" in self._rest:
                part, _, self._rest = self._rest.partition(b"\0")
                answer = json.loads(part)
                if answer.get("id") == self._number:
                    assert "error" not in answer, answer
                    return answer["result"]
                self.events.append(answer)
            read = os.read(self._out, 1 << 20)
            assert read, "the browser has gone"
            self._rest += read

    def resize(self, width: int, height: int, scheme: str = "light") -> None:
        """Set the size of the window, that of a phone below 500 pixels, and the colours that the reader prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def press(self, key: str, modifiers: int = 0) -> None:
        """Press a key; 8 is the modifier Shift."""
        code = {"Enter": 13, "Escape": 27, "ArrowRight": 39}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        both = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown", **both, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **both)

    def errors(self) -> list[Any]:
        """Return the exceptions and errors of the page so far, refusals of its policy among them."""
        self.run("0")  # what came before this answer has been read
        thrown = [event for event in self.events if event["method"] == "Runtime.exceptionThrown"]
        logged = (event for event in self.events if event["method"] == "Log.entryAdded")
        return thrown + [event for event in logged if event["params"]["entry"]["level"] == "error"]

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 30.0) -> None:
        """Until an expression is true."""
        deadline = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < deadline, condition
            time.sleep(0.05)

    def picture(self, name: str) -> None:
        """Save what is on the screen in the folder that the variable PAGE_PICTURES names; without one do nothing."""
        if folder := os.environ.get("PAGE_PICTURES"):
            taken = self.call("Page.captureScreenshot", format=Path(name).suffix[1:], quality=85)
            (Path(folder) / name).write_bytes(base64.b64decode(taken["data"]))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in), os.close(self._out)


@contextmanager
def opened(folder: Path, port: int) -> Iterator[Chromium]:
    """Open the page of a server, whose script may be asked for `$(id)`; skip the test where there is no Chromium."""
    program = find_chromium()
    if program is None:
        pytest.skip("there is no Chromium on this machine (Debian: apt-get install chromium)")
    page = Chromium(program, folder / "profile")
    try:
        page.call("Page.addScriptToEvaluateOnNewDocument", source="var $ = (id) => document.getElementById(id);")
        page.call("Page.navigate", url=f"http://127.0.0.1:{port}/")
        page.wait("document.readyState == 'complete' && $('model').textContent.includes('reads')")
        yield page
    finally:
        page.close()
