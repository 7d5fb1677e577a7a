"""Control Debian's chromium through its DevTools pipe, with the standard library only."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
HOW_TO_GET_IT = "no chromium: apt-get install chromium"
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe")


class Browser:
    """One tab of a separate browser.

    Attributes:
        requests: addresses that pages have requested.
        errors: errors of the console, of the page's policy or of scripts.
    """

    def __init__(self, profile: Path):
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._number = 0
        self._rest = b""
        its_input, self._out = _pipe()
        self._in, its_output = _pipe()
        # Chromium reads commands from 3 and answers on 4.
        script = f'exec "$@" 3<&{its_input} 4>&{its_output}'
        command = ["bash", "-c", script, "bash", CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, pass_fds=(its_input, its_output), **quiet)  # type: ignore[arg-type]
        os.close(its_input)
        os.close(its_output)
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Log", "Runtime", "Network"):
            self.call(f"{domain}.enable")

    def open(self, page: Path | str, *, width: int, is_dark: bool = False) -> None:
        """Show a file or an address in a window of width `width`."""
        address = page if isinstance(page, str) else page.as_uri()
        height = 800
        is_phone = width < 500
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=address)
        while self.evaluate("document.readyState") != "complete" or self.evaluate("location.href") != address:
            pass

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Press a key, such as Tab or Enter."""
        text = {"text": "\r"} if key == "Enter" else {}
        code = {"Tab": 9, "Enter": 13}[key]
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)

    def screenshot(self, path: Path) -> None:
        """Save a picture of the whole page."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def close(self) -> None:
        self._session = None
        self.call("Browser.close")
        self._process.wait(30)
        os.close(self._out)
        os.close(self._in)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Run a command of the DevTools protocol. Events that arrive meanwhile are recorded."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            found = self._receive()
            if found.get("id") == self._number:
                assert "error" not in found, found["error"]
                return found["result"]
            self._note(found)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._in, 1 << 20)
            assert part, "the browser has ended"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event["method"] == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif event["method"] == "Log.entryAdded":
            self.errors.append(parameters["entry"]["text"])
        elif event["method"] == "Runtime.exceptionThrown":
            self.errors.append(parameters["exceptionDetails"]["text"])
        elif event["method"] == "Runtime.consoleAPICalled":
            self.errors.append(str(parameters["args"]))


def _pipe() -> tuple[int, int]:
    """Return both ends of a pipe, with numbers other than 3 and 4, which chromium uses."""
    ends = []
    for low in os.pipe():
        ends.append(fcntl.fcntl(low, fcntl.F_DUPFD, 20))
        os.close(low)
    return ends[0], ends[1]
