"""Headless Chromium, driven over a pipe in its own protocol: nothing else is needed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

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
        self.call("Emulation.setDeviceMetricsOverride", width=1200, height=800, deviceScaleFactor=1, mobile=False)

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

    def picture(self, path: Path) -> None:
        """Save what is on the screen."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in), os.close(self._out)
