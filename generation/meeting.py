"""How the parts of an engine that lies across nodes find each other, and notice an end.

Used by the generator process that leads the engine and by the followers on its other nodes. The
leader writes a *call* into the run's folder, which all nodes share: where it listens, and the name
of this life of the engine, which nobody else knows. A follower connects, names the life, and starts
its part of the server. From then on both say something every BEAT_S; whoever hears nothing for
SILENT_S, or sees the connection close, ends its part. An engine is restarted whole: the leader
calls anew, and the followers answer the new call.

| task            | waits for                        | ends                            |
|-----------------|----------------------------------|---------------------------------|
| `_hear` (n)     | a line of its follower           | with the connection: then `lost`|
| `_beat` (n)     | a clock                          | with the connection             |
| `Listener.wait` | a line of the leader             | at its end, or its word `end`   |
"""

import asyncio
import hmac
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

BEAT_S = 5.0
SILENT_S = 30.0
CONNECT_S = 10.0
LOOK_S = 0.5
"""Between two looks at the folder."""
_BEAT, _END = b"\n", b"end\n"


class Call(msgspec.Struct, frozen=True):
    """Where the leader of an engine listens, in one life of the engine."""

    address: str
    port: int
    life: str
    meets_at: str
    """Where the ranks of all nodes meet, as address:port."""


def call_path(run_dir: Path, index: int) -> Path:
    """The file of generator `index`."""
    return run_dir / "engines" / f"generator-{index}.json"


def read_call(path: Path, *, known: str = "") -> Call | None:
    """The call, unless it is of the life `known`, or there is none."""
    try:
        call = msgspec.json.decode(path.read_bytes(), type=Call)
    except FileNotFoundError:
        return None
    return None if call.life == known else call


class Meeting:
    """The leader's side, for one life of the engine."""

    def __init__(self, path: Path, address: str, followers: int, meets_at: str) -> None:
        """address: this node's, where the followers reach it."""
        self.life = secrets.token_hex(16)
        self._path, self._address, self._followers = path, address, followers
        self._meets_at = meets_at
        self._server: asyncio.Server | None = None
        self._is_closed = False
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def open(self) -> None:
        """Listen, and call."""
        self._server = await asyncio.start_server(self._serve, self._address, 0)
        port = self._server.sockets[0].getsockname()[1]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        staging = self._path.with_suffix(".partial")
        call = Call(self._address, port, self.life, self._meets_at)
        staging.write_bytes(msgspec.json.encode(call))
        os.replace(staging, self._path)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection; strangers are sent away."""
        rank = await _rank_of(reader, self.life)
        if self._is_closed or not 0 < rank <= self._followers or rank in self._writers:
            writer.close()
            return
        self._writers[rank] = writer
        beat = asyncio.ensure_future(_beat(writer))
        try:
            while await _next_line(reader):
                pass
        finally:
            beat.cancel()
            writer.close()
            if not self._lost.done():
                self._lost.set_result(
                    f"the engine's part {rank} of {self._followers + 1}, on another node, ended or "
                    "fell silent: see its log"
                )

    async def lost(self) -> str:
        """Wait until a follower is gone; the reason."""
        return await asyncio.shield(self._lost)

    async def close(self, *, is_over: bool) -> None:
        """Let the followers go: for good, or until the next call."""
        self._is_closed = True
        for writer in self._writers.values():
            with suppress(ConnectionError):
                if is_over:
                    writer.write(_END)
                    await asyncio.wait_for(writer.drain(), CONNECT_S)
            writer.close()
        if self._server is not None:
            self._server.close()
        if (call := read_call(self._path)) is not None and call.life == self.life:
            self._path.unlink()


@dataclass
class Listener:
    """A follower's connection to its leader."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def wait(self) -> bool:
        """Until the leader is gone; whether it said that the run is over."""
        beat = asyncio.ensure_future(_beat(self.writer))
        try:
            while line := await _next_line(self.reader):
                if line == _END:
                    return True
            return False
        finally:
            beat.cancel()

    def close(self) -> None:
        """Leave; the leader notices."""
        self.writer.close()


async def answer(path: Path, rank: int, *, known: str, patience_s: float) -> tuple[Call, Listener]:
    """Connect to the leader of a life that is not `known`, as part `rank` of the engine.

    Raises TimeoutError when none calls, or none can be reached, within patience_s.
    """
    async with asyncio.timeout(patience_s):
        while True:
            call = read_call(path, known=known)
            if call is not None:
                # A call of a job that has ended leads nowhere: the next one replaces it.
                with suppress(OSError, TimeoutError):
                    connecting = asyncio.open_connection(call.address, call.port)
                    reader, writer = await asyncio.wait_for(connecting, CONNECT_S)
                    writer.write(f"{call.life} {rank}\n".encode())
                    return call, Listener(reader, writer)
            await asyncio.sleep(LOOK_S)


async def _rank_of(reader: asyncio.StreamReader, life: str) -> int:
    """The rank that a follower says; 0 for anybody who does not know the life's name."""
    try:
        line = await asyncio.wait_for(reader.readline(), CONNECT_S)
    except (TimeoutError, ConnectionError, ValueError):
        return 0
    name, _, rank = line.decode(errors="replace").strip().partition(" ")
    # As bytes: of text compare_digest takes ASCII alone, and a stranger may write anything.
    is_known = hmac.compare_digest(name.encode(), life.encode())
    return int(rank) if is_known and rank.isdecimal() else 0


async def _next_line(reader: asyncio.StreamReader) -> bytes:
    """The next line; b"" when the other side is gone or silent."""
    try:
        return await asyncio.wait_for(reader.readline(), SILENT_S)
    except (TimeoutError, ConnectionError, ValueError):
        return b""


async def _beat(writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while True:
            writer.write(_BEAT)
            await writer.drain()
            await asyncio.sleep(BEAT_S)
