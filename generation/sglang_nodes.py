"""An SGLang engine whose ranks lie on several nodes: its leader, in the generator process.

The server child here is node 0 of SGLang's; `follower.py` runs the others. `meeting.py` says how
they find each other. The ranks of all nodes take part in a weight sync by themselves.
"""

import asyncio
from dataclasses import replace
from pathlib import Path

from generation.engine import EngineError, EngineSetup
from generation.meeting import Meeting
from generation.sglang_engine import SGLangEngine


class SpreadSGLangEngine(SGLangEngine):
    """Engine over one `sglang.launch_server` child here and one on each other node."""

    def __init__(self, setup: EngineSetup, *, nodes: int, address: str, call: Path) -> None:
        """address: this node's, for the others; call: see `meeting.call_path`."""
        # The port after the server's own, as on one node.
        meets_at = f"{address}:{setup.port + 1}"
        self._meeting = Meeting(call, address, nodes - 1, meets_at)
        super().__init__(node_setup(setup, 0, nodes, meets_at=meets_at, life=self._meeting.life))
        self._is_over = False

    async def start(self) -> None:
        """Call the other nodes, start the server and wait until it answers."""
        await self._meeting.open()
        starting = asyncio.ensure_future(super().start())
        lost = asyncio.ensure_future(self._meeting.lost())
        try:
            await asyncio.wait({starting, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                raise EngineError(lost.result())
            await starting
        finally:
            lost.cancel()
            starting.cancel()

    async def failed(self) -> str:
        """Return the reason when the server here, or a part elsewhere, has ended."""
        ends = [
            asyncio.ensure_future(super().failed()),
            asyncio.ensure_future(self._meeting.lost()),
        ]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            for end in ends:
                end.cancel()

    def dismiss(self) -> None:
        """The run is over: at its end the engine lets the other nodes go for good."""
        self._is_over = True

    async def close(self) -> None:
        """Kill the server here; the other nodes end theirs, and await the next life or not."""
        await self._meeting.close(is_over=self._is_over)
        await super().close()


def node_setup(
    setup: EngineSetup, rank: int, nodes: int, *, meets_at: str, life: str
) -> EngineSetup:
    """The setup of one node's server; meets_at: where all ranks meet, on node 0."""
    log_path = setup.log_path
    if rank:
        log_path = log_path.with_stem(f"{log_path.stem}-node-{rank}")
    return replace(
        setup, nodes=nodes, node_rank=rank, meets_at=meets_at,
        orders=orders_of(setup.log_path, life), log_path=log_path,
    )  # fmt: skip


def orders_of(log_path: Path, life: str) -> Path:
    """The file of the orders of one life: another node may still see an older life's."""
    return log_path.with_suffix(f".{life[:8]}.order.json")
