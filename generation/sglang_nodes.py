"""An SGLang engine with ranks on several nodes: its leader, in the generator process.

The server child here is SGLang's node 0; `follower.py` runs the other nodes. `meeting.py` connects
them. The ranks of all nodes take part in a weight sync by themselves.
"""

from dataclasses import replace
from pathlib import Path

from generation.engine import EngineError, EngineSetup
from generation.meeting import Meeting
from generation.sglang_engine import SGLangEngine
from generation.tasks import end_with_first


class SpreadSGLangEngine(SGLangEngine):
    """Engine over one `sglang.launch_server` child here and one on each other node."""

    def __init__(self, setup: EngineSetup, *, nodes: int, address: str, call: Path) -> None:
        """address: of this node, for the others; call: see `meeting.call_path`."""
        # The port after the server's own, as on one node.
        meets_at = f"{address}:{setup.port + 1}"
        self._meeting = Meeting(call, address, nodes - 1, meets_at)
        super().__init__(
            node_setup(setup, 0, nodes, meets_at=meets_at, session=self._meeting.session)
        )
        self._is_over = False

    async def start(self) -> None:
        """Call the other nodes, start the server and wait until it answers."""
        await self._meeting.open()
        lost = await end_with_first(super().start(), self._meeting.lost())
        if lost is not None:
            raise EngineError(lost)

    async def failed(self) -> str:
        """Return the reason when this server, or a part on another node, has ended."""
        return await end_with_first(super().failed(), self._meeting.lost())

    def dismiss(self) -> None:
        """Note that the run is over: the end of the engine releases the other nodes for good."""
        self._is_over = True

    async def close(self) -> None:
        """Kill this server; the other nodes end theirs, and await the next session or end."""
        await self._meeting.close(is_over=self._is_over)
        await super().close()


def node_setup(
    setup: EngineSetup, rank: int, nodes: int, *, meets_at: str, session: str
) -> EngineSetup:
    """Setup of one node's server; meets_at: rendezvous of all ranks, on node 0."""
    log_path = setup.log_path
    if rank:
        log_path = log_path.with_stem(f"{log_path.stem}-node-{rank}")
    return replace(
        setup, nodes=nodes, node_rank=rank, meets_at=meets_at, log_path=log_path,
        # A name for each session: another node may still see the file of an older one.
        orders=setup.log_path.with_suffix(f".{session[:8]}.order.json"),
    )  # fmt: skip
