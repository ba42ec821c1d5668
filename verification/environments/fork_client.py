"""The host's end of an environment's fork server: starts it, again after its death; forks episodes.

Runs on the generator's event loop, but for `check_target`, which preflight calls. Tasks:

| task | waits for | does |
|---|---|---|
| `_start`, one at a time, for all who want to fork | the pause, then the import | sets `_server` |
| `_watch`, one per server | the keeper's report | counts the death; the next fork starts another |

The end of a server, of `close`, or of this process ends all processes of the environment.
"""

import asyncio
import json
import os
import socket
import subprocess
import time
from pathlib import Path

from megatron_rl.config.errors import InputError
from verification.environments.episode import (
    END_TIMEOUT_S,
    EpisodeProcess,
    describe_end,
    read_report,
)
from verification.environments.settings import EnvironmentFailed, EnvironmentSettings
from verification.pool.fork_client import clean_variables

LONGEST_PAUSE_S = 60.0
MAX_DATAGRAM_BYTES = 4096
MAX_LABEL_CHARS = 200
MAX_WORDS_BYTES = 2000
_CHILD = Path(__file__).with_name("child.py")
_NETWORK_VARIABLES = (
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY",
    "https_proxy", "http_proxy", "no_proxy",
)  # fmt: skip


class Server:
    """A running fork server and its keeper."""

    def __init__(self, target: str, settings: EnvironmentSettings) -> None:
        """Start it. Raises EnvironmentFailed if there is no such interpreter."""
        self.control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.life, life = socket.socketpair()
        self._log_path = Path(settings.log_path).absolute()
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        options = {
            "target": target,
            "log_path": str(self._log_path),
            "memory_bytes": settings.memory_bytes,
            "max_message_bytes": settings.max_message_bytes,
        }
        descriptors = [control.fileno(), life.fileno()]
        command = [settings.python, "-u", str(_CHILD), *map(str, descriptors), json.dumps(options)]
        with control, life, open(self._log_path, "ab") as log:
            self._log_start = log.tell()
            try:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=descriptors,
                    env=clean_variables(settings.paths, settings.variables),
                    # Ctrl-C reaches only this process, which then ends the server.
                    start_new_session=True,
                )
            except OSError as error:
                self.close()
                reason = f"cannot start {settings.python!r}: {error}"
                raise EnvironmentFailed(reason, "start") from error

    def ask_to_end(self) -> None:
        """Have the keeper end all processes and report."""
        try:
            self.life.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # It is gone already.

    def describe_end(self, report: bytes) -> str:
        """How it ended, and its last words."""
        if report:
            return describe_end(report)
        # The interpreter did not get as far as the keeper.
        with open(self._log_path, "rb") as log:
            log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - MAX_WORDS_BYTES))
            lines = log.read().decode(errors="replace").strip().splitlines()
        return f"exit code {self.process.poll()}; its last words: {lines[-1] if lines else ''}"

    def close(self) -> None:
        """Close this end."""
        self.control.close()
        self.life.close()


class ForkClient:
    """Episodes of one environment."""

    def __init__(self, target: str, settings: EnvironmentSettings) -> None:
        self._target = target
        self._settings = settings
        self._server: Server | None = None
        self._starting: asyncio.Task[Server] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._failures = 0
        """Failed starts and deaths of servers since an episode came to its end."""
        self._last_failure = ""
        self._retry_at_s = 0.0
        self._is_closed = False

    async def fork(self, label: str) -> EpisodeProcess:
        """Fork an episode. Raises EnvironmentFailed of kind "start"."""
        messages, their_messages = socket.socketpair()
        life, their_life = socket.socketpair()
        for connection in (messages, life):
            connection.setblocking(False)
        body = json.dumps({"label": label[:MAX_LABEL_CHARS]}).encode()
        try:
            with their_messages, their_life:
                await self._send(body, [their_messages.fileno(), their_life.fileno()])
        except BaseException:
            messages.close()
            life.close()
            raise
        return EpisodeProcess(messages, life, self._settings)

    def note_end(self) -> None:
        """An episode came to its end: later failures are counted from 0."""
        self._failures = 0

    def end_server(self) -> None:
        """End all processes; the next fork starts again."""
        if self._server is not None:
            self._server.ask_to_end()
            self._server = None

    async def close(self) -> None:
        """End all processes; later forks fail."""
        self._is_closed = True
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.wait([self._starting], timeout=2 * END_TIMEOUT_S)
        self.end_server()
        if self._watching is not None:
            await asyncio.wait([self._watching], timeout=2 * END_TIMEOUT_S)

    async def _send(self, body: bytes, descriptors: list[int]) -> None:
        """Send a request to the fork server, to a new one if it just ended."""
        for _ in range(2):
            server = await self._running()
            try:
                # Waits for room, for a moment: the server reads whenever it does not fork.
                async with asyncio.timeout(END_TIMEOUT_S):
                    while True:
                        try:
                            socket.send_fds(server.control, [body], descriptors)
                            return
                        except BlockingIOError:
                            await asyncio.sleep(0.01)
            except TimeoutError:
                server.ask_to_end()
            except OSError:
                pass  # It ended: `_watch` is about to count it.
            # Another episode may have started the next one.
            if self._server is server:
                self._server = None
        raise EnvironmentFailed("its fork server ends again and again", "start")

    async def _running(self) -> Server:
        if self._is_closed:
            raise EnvironmentFailed("the host is closed", "start")
        if self._server is not None:
            return self._server
        if self._starting is None or self._starting.done():
            self._starting = asyncio.ensure_future(self._start())
        # Who is cancelled here leaves the start to the others.
        await asyncio.wait([self._starting])
        if self._starting.cancelled():
            raise EnvironmentFailed("the host is closed", "start")
        return self._starting.result()

    async def _start(self) -> Server:
        if self._watching is not None:
            # The server before ends first, and is counted.
            await asyncio.wait([self._watching], timeout=END_TIMEOUT_S)
        pause_s = self._retry_at_s - time.monotonic()
        if pause_s > 0:
            if self._failures >= self._settings.max_starts:
                reason = f"{self._failures} starts failed in a row, the last: {self._last_failure}"
                raise EnvironmentFailed(reason, "start")
            await asyncio.sleep(pause_s)
        try:
            server = Server(self._target, self._settings)
        except EnvironmentFailed as error:
            raise self._fail(error.reason) from error
        server.control.setblocking(False)
        server.life.setblocking(False)
        loop = asyncio.get_running_loop()
        fault = f"the import took over {self._settings.start_timeout_s:g} s"
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                received = await loop.sock_recv(server.control, MAX_DATAGRAM_BYTES)
            form, fault = _read_start(received)
        except TimeoutError:
            form = ""
        except ConnectionResetError:
            form, fault = "", ""
        except asyncio.CancelledError:
            await self._end(server)
            raise
        if not form:
            words = await self._end(server)
            raise self._fail(fault or words)
        self._server = server
        self._watching = asyncio.ensure_future(self._watch(server))
        return server

    async def _watch(self, server: Server) -> None:
        report = await read_report(server.life, None)
        if self._server is server:
            self._server = None
        self._fail(f"its fork server ended: {await self._reap(server, report or b'')}")

    async def _end(self, server: Server) -> str:
        server.ask_to_end()
        return await self._reap(server, await read_report(server.life, END_TIMEOUT_S) or b"")

    async def _reap(self, server: Server, report: bytes) -> str:
        server.close()
        # The keeper closes its socket by exiting.
        deadline_s = time.monotonic() + END_TIMEOUT_S
        while server.process.poll() is None and time.monotonic() < deadline_s:
            await asyncio.sleep(0.002)
        return server.describe_end(report)

    def _fail(self, reason: str) -> EnvironmentFailed:
        """Count a failure, and delay the next start."""
        self._failures += 1
        pause_s = min(LONGEST_PAUSE_S, self._settings.first_pause_s * 2 ** (self._failures - 1))
        if self._failures >= self._settings.max_starts:
            pause_s = LONGEST_PAUSE_S
        self._retry_at_s = time.monotonic() + pause_s
        self._last_failure = reason
        return EnvironmentFailed(reason, "start")


def check_target(target: str, settings: EnvironmentSettings) -> str:
    """Import an environment once; its form: "function", "text_game" or "tools".

    Raises InputError with the fix.
    """
    module, _, name = target.partition(":")
    if not module or not name:
        raise InputError(f"the environment {target!r} is no 'module:name': name one such")
    try:
        server = Server(target, settings)
    except EnvironmentFailed as error:
        raise InputError(
            f"{error.reason}; expected an interpreter of Python 3.9 or later: "
            "set expert.environments.python"
        ) from error
    server.control.settimeout(settings.start_timeout_s)
    server.life.settimeout(END_TIMEOUT_S)
    form, fault = "", f"the import took over {settings.start_timeout_s:g} s"
    try:
        form, fault = _read_start(server.control.recv(MAX_DATAGRAM_BYTES))
        server.ask_to_end()
        report = server.life.recv(1 << 16)
        server.process.wait(END_TIMEOUT_S)
        fault = fault or server.describe_end(report)
    except (TimeoutError, subprocess.TimeoutExpired):
        pass
    finally:
        server.close()
    if not form:
        raise InputError(
            f"cannot load the environment {target!r} in {settings.python}: {fault}\nExpected a "
            "module in the working directory, in PYTHONPATH or installed there, with an async "
            "function of (prompt, policy), a class with reset and step, or tools_episode(...). "
            "Fix the module, or set expert.environments.python; its output is in "
            f"{settings.log_path}{_network_hint(fault, settings)}"
        )
    return form


def _network_hint(fault: str, settings: EnvironmentSettings) -> str:
    """Which variables to pass, if the output is about certificates or a proxy; else ""."""
    words = (fault + Path(settings.log_path).read_text(errors="replace")).lower()
    if "certificate" not in words and "proxy" not in words:
        return ""
    here = [name for name in _NETWORK_VARIABLES if name in os.environ]
    names = sorted({*settings.variables, *(here or ["SSL_CERT_FILE", "HTTPS_PROXY"])})
    return (
        "\nThe output is about certificates or a proxy, and an environment gets no variables of "
        f"the shell but named ones: set expert.environments.variables={json.dumps(names)}"
    )


def _read_start(datagram: bytes) -> tuple[str, str]:
    """(form, why it failed) of the fork server's first datagram; ("", "") if it died."""
    if not datagram:
        return "", ""
    found = json.loads(datagram)
    return found.get("ready", ""), found.get("failed", "")
