"""Pages in a real browser, headless; tests that use it are skipped where there is none."""

import asyncio
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs the program chromium")
_TIMEOUT_S = 120


def open_page(address: str, profile: Path) -> tuple[str, list[str]]:
    """The document after its scripts have run, and what they and the browser complained of."""
    assert CHROMIUM is not None
    command = [
        CHROMIUM, "--headless", "--disable-gpu", "--enable-logging=stderr",
        f"--user-data-dir={profile}", "--virtual-time-budget=20000", "--dump-dom",
        *(["--no-sandbox"] if os.getuid() == 0 else []), address,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S)
    said = done.stderr.decode(errors="replace")
    assert done.returncode == 0, said
    return done.stdout.decode(errors="replace"), re.findall(r'CONSOLE.*?\] "(.*)', said)


class Page:
    """A page of a browser that goes on, by Chromium's DevTools protocol."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self.complaints: list[str] = []

    async def call(self, method: str, **given: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": given})
        while True:
            answer = await self._socket.receive_json(timeout=60)
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(str(answer["params"]))
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    async def value(self, script: str) -> Any:
        """What an expression gives in the page."""
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        return found["result"].get("value")

    async def until(self, script: str) -> None:
        """Wait until an expression is true."""
        for _ in range(300):
            if await self.value(script):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"never came true: {script}")

    async def press(self, key: str) -> None:
        """Press a key."""
        text = {"text": key} if len(key) == 1 else {}
        await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def write(self, text: str) -> None:
        """Type into what has the focus."""
        await self.call("Input.insertText", text=text)


async def _loaded(session: aiohttp.ClientSession, port: str, address: str) -> str:
    """Where the page of an address is asked, once it is there."""
    for _ in range(600):
        async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            for one in await answer.json():
                if one["type"] == "page" and one["url"] == address:
                    url: str = one["webSocketDebuggerUrl"]
                    return url
        await asyncio.sleep(0.05)
    raise AssertionError(f"{address} was not opened")


@asynccontextmanager
async def browse(address: str, profile: Path) -> AsyncIterator[Page]:
    """A page that can be used."""
    assert CHROMIUM is not None
    command = [
        CHROMIUM, "--headless", "--disable-gpu", f"--user-data-dir={profile}",
        "--remote-debugging-port=0", *(["--no-sandbox"] if os.getuid() == 0 else []), address,
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        port_file = profile / "DevToolsActivePort"
        for _ in range(600):
            if port_file.exists() and len(port_file.read_text().split()) == 2:
                break
            await asyncio.sleep(0.05)
        port = port_file.read_text().split()[0]
        async with aiohttp.ClientSession() as session:
            # A page that is asked while it goes elsewhere may never answer.
            socket_url = await _loaded(session, port, address)
            async with session.ws_connect(socket_url, max_msg_size=0) as socket:
                page = Page(socket)
                for area in ("Runtime", "Log", "Page"):
                    await page.call(f"{area}.enable")
                yield page
    finally:
        process.terminate()
        process.wait(timeout=60)
