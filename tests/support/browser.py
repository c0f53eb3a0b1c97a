"""A headless Chromium, driven over the DevTools protocol (https://chromedevtools.github.io/devtools-protocol/)."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING, Any, Self

import websocket

from tests.support.models import ROOT
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_UNPACKED = ROOT / "build" / "chromium"
_PROGRAM = _UNPACKED / "usr" / "lib" / "chromium" / "chromium-headless-shell"
_INSTALLED = ("chromium", "chromium-browser", "google-chrome")
_FONTS = f"""<fontconfig>
<dir>{_UNPACKED / "usr" / "share" / "fonts"}</dir>
<alias><family>monospace</family><prefer><family>DejaVu Sans Mono</family></prefer></alias>
<alias><family>serif</family><prefer><family>DejaVu Serif</family></prefer></alias>
<cachedir prefix="cwd">fonts</cachedir>
</fontconfig>"""
_LIMIT_S = 30.0
_PHONE = 390
_MIDDLE = 128
_BRIGHTNESS = """(() => {
  const shades = [document.body, document.documentElement].map((one) => getComputedStyle(one).%s);
  const shade = shades.find((one) => one !== "rgba(0, 0, 0, 0)") ?? "rgb(255, 255, 255)";
  return Math.max(...shade.match(/\\d+/g).slice(0, 3));
})()"""
"""The brightest part of the page's colour, of 255: where neither element has one the browser's own is white."""
_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-breakpad"),
    *("--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0"),
)


def chromium() -> str | None:
    """The program: what `make programs` unpacked, or the system's; None where there is none."""
    return str(_PROGRAM) if _PROGRAM.exists() else next(filter(None, map(shutil.which, _INSTALLED)), None)


def _environment(profile: Path) -> dict[str, str]:
    """The variables that lead what was unpacked to its libraries and fonts."""
    if not _PROGRAM.exists():
        return dict(os.environ)
    fonts = profile / "fonts.conf"
    fonts.write_text(_FONTS, encoding="utf-8")
    # PulseAudio keeps a library of its own in a folder below.
    places = ("lib/*-gnu*", "usr/lib/*-gnu*", "usr/lib/*-gnu*/pulseaudio")
    paths = os.pathsep.join(str(found) for place in places for found in _UNPACKED.glob(place))
    return {**os.environ, "LD_LIBRARY_PATH": paths, "FONTCONFIG_FILE": str(fonts)}


class Browser:
    """A browser with a profile of its own; use it in a `with` block."""

    def __init__(self, profile: Path) -> None:
        self._profile = profile

    def __enter__(self) -> Self:
        program = chromium()
        if program is None:
            raise FileNotFoundError("chromium is neither in build/ nor on the PATH")
        self._process = subprocess.Popen(
            [program, *_OPTIONS, f"--user-data-dir={self._profile}", "about:blank"],
            env=_environment(self._profile),
            cwd=self._profile,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        told = self._profile / "DevToolsActivePort"
        port, path = wait_for(lambda: told.is_file() and told.read_text().split(), "the browser's port", _LIMIT_S)
        self._url = f"ws://127.0.0.1:{port}{path}"
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def page(self) -> Page:
        """An empty page with storage and a cache of its own; to be closed, as it works on while it is open."""
        return Page(self._url)


class PageError(Exception):
    """A script failed, or a command of the protocol did."""


class CommandRefused(PageError):
    """The browser has not done what a command asks; it refuses a page that goes elsewhere meanwhile."""


class Page:
    """A page.

    Attributes:
        requests: Every address it has asked for.
        problems: Errors of its scripts, what they wrote to the console, and what the browser itself complained of.
        on: Called with an event's parameters, by the event's name; may `send` and must not `call`.
    """

    def __init__(self, url: str) -> None:
        self.requests: list[str] = []
        self.problems: list[str] = []
        self.on: dict[str, Callable[[dict[str, Any]], None]] = {}
        self._socket = websocket.create_connection(url, timeout=_LIMIT_S, suppress_origin=True)
        self._serial = itertools.count(1)
        self._session: str | None = None
        context = self.call("Target.createBrowserContext", disposeOnDetach=True)["browserContextId"]
        # A page may copy what its user asks it to copy; the shell without windows has nobody to ask.
        self.call("Browser.grantPermissions", browserContextId=context, permissions=["clipboardSanitizedWrite"])
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log", "Accessibility", "DOM"):
            self.call(f"{domain}.enable")
        self.look()

    def close(self) -> None:
        """Leaves it; the browser forgets it and its storage."""
        self._socket.close()

    def send(self, method: str, **parameters: Any) -> int:
        serial = next(self._serial)
        message = {"id": serial, "method": method, "params": parameters}
        self._socket.send(json.dumps(message if self._session is None else {**message, "sessionId": self._session}))
        return serial

    def call(self, method: str, **parameters: Any) -> Any:
        """The result of a command; meanwhile events are taken in. `CommandRefused` where the browser refuses."""
        serial = self.send(method, **parameters)
        while (message := json.loads(self._socket.recv())).get("id") != serial:
            self._hear(message)
        if "error" in message:
            raise CommandRefused(f"{method}: {message['error']['message']}")
        return message["result"]

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'", "the page")

    def run(self, script: str) -> Any:
        """The value of an expression, awaited where it is a promise; `PageError` where it throws."""
        found = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in found:
            raise PageError(found["exceptionDetails"].get("exception", found["exceptionDetails"]).get("description"))
        return found["result"].get("value")

    def wait(self, condition: str, what: str = "") -> None:
        """Waits until an expression is true; while the page goes elsewhere it is not."""

        def holds() -> bool:
            try:
                return bool(self.run(f"Boolean({condition})"))
            except CommandRefused:
                return False

        wait_for(holds, what or condition, _LIMIT_S)

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def fill(self, selector: str, value: str) -> None:
        place, given = json.dumps(selector), json.dumps(value)
        self.run(
            f"(() => {{ const field = document.querySelector({place}); field.value = {given};"
            "for (const kind of ['input', 'change']) field.dispatchEvent(new Event(kind, { bubbles: true })); })()"
        )

    def click(self, selector: str) -> None:
        place = json.dumps(selector)
        box = self.run(
            f"(() => {{ const element = document.querySelector({place}); element.scrollIntoView({{ block: 'center' }});"
            "const box = element.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def press(self, key: str, code: int, *, control: bool = False, text: str = "") -> None:
        shared = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 2 if control else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **shared)
        self.call("Input.dispatchKeyEvent", type="keyUp", **shared)

    def paste(self, selector: str) -> str:
        """Puts what was copied into a field, and returns what the field then holds."""
        place = json.dumps(selector)
        self.run(f"document.querySelector({place}).focus()")
        self.call("Input.dispatchKeyEvent", type="keyDown", key="v", modifiers=2, commands=["paste"])
        self.call("Input.dispatchKeyEvent", type="keyUp", key="v", modifiers=2)
        return str(self.run(f"document.querySelector({place}).value"))

    def look(self, *, width: int = 1280, height: int = 900, dark: bool = False, reduced: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if reduced else "no-preference"},
        ]
        self.call("Emulation.setEmulatedMedia", features=features)

    def offline(self, off: bool) -> None:  # noqa: FBT001  it is the whole question
        self.call(
            "Network.emulateNetworkConditions", offline=off, latency=0, downloadThroughput=-1, uploadThroughput=-1
        )

    def names(self) -> list[tuple[str, str]]:
        """Role and name of everything in the accessibility tree."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            (entry["role"]["value"], entry.get("name", {}).get("value", "")) for entry in nodes if not entry["ignored"]
        ]

    def _hear(self, message: dict[str, Any]) -> None:
        method, parameters = message.get("method", ""), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(str(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.problems.append(f"console.{parameters['type']}: {parameters['args']}")
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(parameters["entry"]["text"])
        if method in self.on:
            self.on[method](parameters)


_WIDER = "[...document.querySelectorAll('.scroll, figure')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
_STRUCK = """[...document.querySelectorAll('svg text')].filter(text => {
  const box = text.getBoundingClientRect(), drawn = text.ownerSVGElement.querySelectorAll('.series path, .limit path');
  return box.width && [...drawn].some(line => {
    const matrix = line.getScreenCTM(), length = line.getTotalLength();
    for (let at = 0; at <= length; at += 2) {
      const {x, y} = line.getPointAtLength(at).matrixTransform(matrix);
      if (x > box.left && x < box.right && y > box.top + 1 && y < box.bottom - 1) return true;
    }
  });
}).map(text => text.textContent)"""


def is_whole_on_a_phone(page: Page) -> None:
    """Checks that nothing of a report is scrolled sideways on a phone, and that no line strikes through a word."""
    page.look(width=_PHONE, height=844)
    assert page.run(_WIDER) == 0
    assert page.run(_STRUCK) == []
    page.look()
    assert page.run(_STRUCK) == []


def fits_a_phone(page: Page) -> None:
    """Checks that a page is never scrolled sideways, and is light or dark as its reader likes it."""
    for dark in (False, True):
        page.look(width=_PHONE, height=844, dark=dark)
        # A page that follows the preference by a script does so only when it draws its next frame.
        page.wait(f"({_BRIGHTNESS % 'backgroundColor'} < {_MIDDLE}) === {json.dumps(dark)}", "the background")
        page.wait(f"({_BRIGHTNESS % 'color'} < {_MIDDLE}) === {json.dumps(not dark)}", "the text")
        assert page.run("document.documentElement.scrollWidth") <= _PHONE
