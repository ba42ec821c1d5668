"""Connection between the nodes of one engine: they find each other, and notice when one ends.

Used by the generator process that leads the engine and by the followers on its other nodes. The
leader writes a *call* into the run's folder, which all nodes share: its address, and a secret name
of this session of the engine. A follower connects, sends the name, and starts its part of the
server. From then on both send a line every BEAT_S. A side that receives nothing for SILENT_S, or
sees the connection close, ends its part. An engine is restarted whole: the leader writes a new
call, and the followers answer it.

| task            | waits for                        | ends                            |
|-----------------|----------------------------------|---------------------------------|
| `_hear` (n)     | a line of its follower           | with the connection: then `lost`|
| `_beat` (n)     | a clock                          | with the connection             |
| `Listener.wait` | a line of the leader             | at its end, or its word `end`   |
"""

import asyncio
import hmac
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from megatron_rl.protocol.whole_file import write_whole

BEAT_S = 5.0
SILENT_S = 30.0
CONNECT_S = 10.0
LOOK_S = 0.5
"""Seconds between two looks at the folder."""
_BEAT, _END = b"\n", b"end\n"


class Call(msgspec.Struct, frozen=True):
    """Address of the leader, for one session of the engine."""

    address: str
    port: int
    session: str
    meets_at: str
    """Rendezvous of the ranks of all nodes, as address:port."""


def call_path(run_dir: Path, index: int) -> Path:
    """The file of generator `index`."""
    return run_dir / "engines" / f"generator-{index}.json"


def read_call(path: Path, *, known: str = "") -> Call | None:
    """Read the call; None: there is none, or it is that of the session `known`."""
    try:
        call = msgspec.json.decode(path.read_bytes(), type=Call)
    except FileNotFoundError:
        return None
    return None if call.session == known else call


class Meeting:
    """The leader's side of one session of the engine."""

    def __init__(self, path: Path, address: str, followers: int, meets_at: str) -> None:
        """address: of this node, for the followers."""
        self.session = secrets.token_hex(16)
        self._path, self._address, self._followers = path, address, followers
        self._meets_at = meets_at
        self._server: asyncio.Server | None = None
        self._is_closed = False
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def open(self) -> None:
        """Listen, and write the call."""
        self._server = await asyncio.start_server(self._serve, self._address, 0)
        port = self._server.sockets[0].getsockname()[1]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        call = Call(self._address, port, self.session, self._meets_at)
        # It holds the session's secret name.
        write_whole(self._path, msgspec.json.encode(call), is_private=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection; close it if it does not know the name."""
        rank = await _rank_of(reader, self.session)
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
        """Wait until a follower is lost; return the reason."""
        return await asyncio.shield(self._lost)

    async def close(self, *, is_over: bool) -> None:
        """Release the followers: for good, or until the next call."""
        self._is_closed = True
        for writer in self._writers.values():
            with suppress(ConnectionError):
                if is_over:
                    writer.write(_END)
                    await asyncio.wait_for(writer.drain(), CONNECT_S)
            writer.close()
        if self._server is not None:
            self._server.close()
        if (call := read_call(self._path)) is not None and call.session == self.session:
            self._path.unlink()


@dataclass
class Listener:
    """A follower's connection to its leader."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def wait(self) -> bool:
        """Wait until the leader is gone; return whether it said that the run has ended."""
        beat = asyncio.ensure_future(_beat(self.writer))
        try:
            while line := await _next_line(self.reader):
                if line == _END:
                    return True
            return False
        finally:
            beat.cancel()

    def close(self) -> None:
        """Leave the leader, which notices it."""
        self.writer.close()


async def answer(
    path: Path, rank: int, *, known: str, patience_s: float, after: Path | None = None
) -> tuple[Call, Listener]:
    """Connect to the leader of another session than `known`, as part `rank` of the engine.

    after: a folder without which patience_s does not begin. Raises TimeoutError without a reachable
    leader within patience_s.
    """
    ends_at = None
    while ends_at is None or time.monotonic() < ends_at:
        if ends_at is None and (after is None or after.exists()):
            ends_at = time.monotonic() + patience_s
        call = read_call(path, known=known)
        if call is not None:
            # A call of an ended job leads nowhere; the next call replaces it.
            with suppress(OSError, TimeoutError):
                connecting = asyncio.open_connection(call.address, call.port)
                reader, writer = await asyncio.wait_for(connecting, CONNECT_S)
                writer.write(f"{call.session} {rank}\n".encode())
                return call, Listener(reader, writer)
        await asyncio.sleep(LOOK_S)
    raise TimeoutError


async def _rank_of(reader: asyncio.StreamReader, session: str) -> int:
    """Rank that a follower sends; 0 for a peer that does not know the session's name."""
    try:
        line = await asyncio.wait_for(reader.readline(), CONNECT_S)
    except (TimeoutError, ConnectionError, ValueError):
        return 0
    name, _, rank = line.decode(errors="replace").strip().partition(" ")
    # As bytes: compare_digest takes only ASCII text, and a stranger may write anything.
    is_known = hmac.compare_digest(name.encode(), session.encode())
    return int(rank) if is_known and rank.isdecimal() else 0


async def _next_line(reader: asyncio.StreamReader) -> bytes:
    """Read the next line; b"" when the other side is gone or silent."""
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
