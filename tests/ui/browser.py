"""A headless Chromium, spoken to by the DevTools protocol: enough to look at a page and click.

By hand: ``python -m tests.ui.browser URL PICTURE --width 1600 --dark``.
"""

import argparse
import asyncio
import base64
import contextlib
import itertools
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
START_S = 30.0


def find() -> str | None:
    """The first browser here that starts: one whose installation was cut short does not."""
    found = (path for name in NAMES if (path := shutil.which(name)))
    return next((path for path in found if _starts(path)), None)


def _starts(path: str) -> bool:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        asked = subprocess.run([path, "--version"], capture_output=True, timeout=20, check=False)
        return asked.returncode == 0
    return False


class Tab:
    """One page that is open."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.complaints: list[str] = []
        """What the page wrote as errors: exceptions, refused requests."""
        self.requested: list[str] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            answer = await self._socket.receive_json(timeout=START_S)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self._hear(answer)

    def _hear(self, event: dict[str, Any]) -> None:
        match event:
            case {"method": "Runtime.exceptionThrown", "params": {"exceptionDetails": details}}:
                what = details.get("exception", {}).get("description", details["text"])
                self.complaints.append(what)
            case {"method": "Log.entryAdded", "params": {"entry": entry}}:
                if entry["level"] == "error":
                    self.complaints.append(entry["text"])
            case {"method": "Network.requestWillBeSent", "params": {"request": request}}:
                self.requested.append(request["url"])
            case _:
                pass

    async def open(self, url: str, width: int, height: int, *, dark: bool = False) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.resize(width, height)
        await self.call("Page.navigate", url=url)

    async def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)

    async def value(self, expression: str) -> Any:
        asked = {"expression": expression, "awaitPromise": True, "returnByValue": True}
        result = await self.call("Runtime.evaluate", **asked)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, expression: str, timeout_s: float = 20.0) -> Any:
        """Wait until an expression is true in the page."""
        for _ in range(int(timeout_s / 0.1)):
            with contextlib.suppress(AssertionError):
                if value := await self.value(expression):
                    return value
            await asyncio.sleep(0.1)
        raise AssertionError(f"never true: {expression}; complaints: {self.complaints}")

    async def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            where = {"x": x, "y": y, "button": "left", "clickCount": 1}
            await self.call("Input.dispatchMouseEvent", type=kind, **where)

    async def picture(self, *, whole: bool = True) -> bytes:
        asked = {"format": "png", "captureBeyondViewport": whole}
        return base64.b64decode((await self.call("Page.captureScreenshot", **asked))["data"])


@asynccontextmanager
async def browsing(path: str) -> AsyncIterator[Tab]:
    """A browser with one empty tab; nothing of it is left."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [path, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--remote-debugging-port=0",
             f"--user-data-dir={folder}", "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            port = await _port_of(Path(folder))
            async with aiohttp.ClientSession() as session:
                url = f"http://127.0.0.1:{port}/json/list"
                async with session.get(url) as answer:
                    tabs = [one for one in await answer.json() if one["type"] == "page"]
                opened = session.ws_connect(tabs[0]["webSocketDebuggerUrl"], max_msg_size=1 << 28)
                async with opened as socket:
                    yield Tab(socket)
        finally:
            process.kill()
            process.wait()


async def _port_of(folder: Path) -> int:
    for _ in range(int(START_S / 0.1)):
        with contextlib.suppress(OSError, IndexError, ValueError):
            return int((folder / "DevToolsActivePort").read_text().split()[0])
        await asyncio.sleep(0.1)
    raise AssertionError("the browser did not start")


async def _shoot(given: argparse.Namespace) -> None:
    path = find()
    assert path, f"none of {', '.join(NAMES)} is installed"
    async with browsing(path) as tab:
        await tab.open(given.url, given.width, given.height, dark=given.dark)
        await tab.until("window.p2ptrain && p2ptrain.state.peers.length > 0")
        await asyncio.sleep(given.wait)
        if given.run:
            await tab.value(given.run)
            await asyncio.sleep(1.5)
        if given.whole:
            height = await tab.value("document.documentElement.scrollHeight")
            await tab.resize(given.width, height)
            await asyncio.sleep(1.0)
        Path(given.picture).write_bytes(await tab.picture())
        print(
            "complaints:",
            tab.complaints,
            "overflow:",
            await tab.value("document.documentElement.scrollWidth - innerWidth"),
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("picture")
    parser.add_argument("--width", type=int, default=1600)
    parser.add_argument("--height", type=int, default=1000)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--wait", type=float, default=4.0)
    parser.add_argument("--run", default="")
    asyncio.run(_shoot(parser.parse_args()))


if __name__ == "__main__":
    main()
