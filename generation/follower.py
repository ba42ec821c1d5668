"""One node's part of an engine on several nodes: the server of its ranks.

Entry: `python -m generation.follower --config RUN_DIR/config.toml --index 3 --node 1 --nodes 2`. It
answers the calls of the engine's leader (`meeting.py`), a generator on another node, and runs a
server child for each session of the engine, until the leader ends the run. Weights reach its
ranks directly; everything else goes through the leader. One event loop.
"""

import argparse
import asyncio
import logging
import sys
from pathlib import Path

from generation.child import ServerChild
from generation.engine import EngineSetup, engine_setup
from generation.meeting import answer, call_path
from generation.sglang_command import server_command, server_environment
from generation.sglang_engine import PARTS
from generation.sglang_nodes import node_setup
from generation.sglang_orders import LOADER
from generation.tasks import end_with_first, interrupted
from generation.weight_client import RoomWait, room_wait
from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.protocol.process import Interrupted, note_ready, run_main, set_up_logging
from megatron_rl.protocol.render import open_renderer
from megatron_rl.protocol.wire import DeadlineExceeded

log = logging.getLogger(__name__)


async def follow(
    setup: EngineSetup, call: Path, node: int, nodes: int, *, room: RoomWait | None = None
) -> None:
    """Run this node's part of every session of the engine. Raises DeadlineExceeded.

    room: what the leader waits for before it calls.
    """
    known = ""
    patience_s, after = setup.start_timeout_s, None
    keys = "expert.generator.start_timeout_s"
    if room is not None:
        patience_s, after = patience_s + room.limit_s, room.after
        keys += ", and the leader's wait for room on its GPUs"
    while True:
        try:
            found, listener = await answer(
                call, node, known=known, patience_s=patience_s, after=after
            )
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the generator that leads this engine did not call in {patience_s:.0f} s "
                f"({keys}): no {call} that leads to it"
            ) from error
        note_ready()
        known = found.session
        mine = node_setup(setup, node, nodes, meets_at=found.meets_at, session=found.session)
        child = ServerChild(mine.log_path)
        waiting = asyncio.ensure_future(listener.wait())
        try:
            await child.start(
                server_command(mine, LOADER), server_environment(mine), nice=mine.nice
            )
            died = asyncio.ensure_future(child.lost(PARTS))
            await asyncio.wait({waiting, died}, return_when=asyncio.FIRST_COMPLETED)
            if died.done():
                log.error("part %d of the engine ended: %s", node, died.result())
            died.cancel()
            if waiting.done() and waiting.result():
                return
            log.warning("this session of the engine is over; waiting for the next call")
        finally:
            waiting.cancel()
            # The server first: the leader starts the next session when the connection ends.
            await child.close()
            listener.close()


def main(config: Config, index: int, node: int, nodes: int) -> None:
    """Follow until the leader ends the run or a signal arrives."""
    set_up_logging(f"generator-{index}-node-{node}", config.run.dir / "logs")
    setup = engine_setup(config, index, open_renderer(config).stop_ids)
    call, room = call_path(config.run.dir, index), room_wait(config)
    work = follow(setup, call, node, nodes, room=room)
    number = asyncio.run(end_with_first(interrupted(), work))
    if number is not None:
        raise Interrupted(128 + number)


def start() -> int:
    """Entry of the process."""
    parser = argparse.ArgumentParser(description="One node's part of a generator's engine.")
    parser.add_argument("--config", type=Path, required=True, help="resolved config.toml")
    parser.add_argument("--index", type=int, required=True, help="which generator of the run")
    parser.add_argument("--node", type=int, required=True, help="which node of the engine, from 1")
    parser.add_argument("--nodes", type=int, required=True, help="nodes of the engine")
    options = parser.parse_args()
    config = load_config(options.config, [])
    return run_main(
        f"generator-{options.index}-node-{options.node}",
        lambda: main(config, options.index, options.node, options.nodes),
    )


if __name__ == "__main__":
    sys.exit(start())
