"""A spare node waits until a node of the trainer is lost, and takes its place.

Used by `nodes.py`, in its one thread. The spare reads the run's heartbeat (RUN/alive.json), which
names lost nodes. It claims a place by a file, so that no other spare takes it too.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_rl.config.tree import NodesConfig
from megatron_rl.launcher.claims import claimed
from megatron_rl.launcher.node_link import NodeLost
from megatron_rl.observe.heartbeat import ALIVE, PREPARED, Beat, read_beat

_LOOK_S = 1.0

log = logging.getLogger(__name__)


@contextmanager
def lost_place(run_dir: Path, limits: NodesConfig) -> Iterator[int | None]:
    """The number of a lost node, whose place is this spare's in the block; None: the run has ended.

    Raises NodeLost when the first node does not start or falls silent.
    """
    heard_at, limit_s = time.monotonic(), limits.start_timeout_s
    known = _key_of(read_beat(run_dir))
    while True:
        beat = read_beat(run_dir)
        if beat is not None and _key_of(beat) != known and beat.phase != PREPARED:
            known, heard_at, limit_s = _key_of(beat), time.monotonic(), limits.silence_timeout_s
            if beat.has_ended:
                yield None
                return
            for node, start in beat.lost.items():
                with claimed(run_dir, f"place-{node}", count=1, first=start) as numbers:
                    # Another spare has taken the place that this loss left, if it is another one.
                    if numbers.start == start:
                        log.info("this spare node takes the place of node %d", node)
                        yield node
                        return
        if time.monotonic() - heard_at > limit_s:
            raise NodeLost(
                f"the first node has not renewed {run_dir / ALIVE} for {limit_s:.0f} s: start the "
                "run, and then this spare node again"
            )
        time.sleep(_LOOK_S)


def _key_of(beat: Beat | None) -> tuple[float, int]:
    """Differs between any two beats."""
    return (0.0, 0) if beat is None else (beat.started, beat.count)
