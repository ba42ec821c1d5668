"""Processes that each rehearse one rank: `python -m megatron_rl.rehearsal.ranks FOLDER`.

FOLDER has request.json. The process imports Megatron-Core once, then forks a child for each rank;
each child writes FOLDER/RANK.json, or its error to FOLDER/RANK.error.
"""

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from megatron_rl.protocol.process import die_with_parent, set_up_logging
from megatron_rl.rehearsal import engine_stand_in
from megatron_rl.rehearsal.events import REQUEST, Request, write_trace

_POLL_S = 0.05
Change = Callable[..., Any]


def serve(
    folder: Path, request: Request, change: Change | None = None, of_engine: Change | None = None
) -> None:
    """Rehearse all ranks, some at a time.

    change: see `rehearse_rank`. of_engine: `change` of `rehearse_engine_rank`.
    """
    # Only here: the stand-in must be in place before Megatron-Core is imported.
    from megatron_rl.config.files import load_config
    from megatron_rl.rehearsal.rank import Work, rehearse_engine_rank, rehearse_rank
    from megatron_rl.rehearsal.weight_sync import layouts_of
    from megatron_rl.weights.layout.shape import read_shape

    cfg = load_config(Path(request.config), [])
    shape = read_shape(cfg.model.path)
    work = Work(request.microbatches, request.tokens, request.sequence_tokens)
    if request.engine_ranks:
        # Once, for all that are forked; those who need a plan that is impossible say why.
        with contextlib.suppress(ValueError):
            layouts_of(cfg, shape).plan()

    def rehearse(rank: int) -> None:
        try:
            if rank in request.engine_ranks:
                engine_change = of_engine or (lambda *_: None)
                found = rehearse_engine_rank(cfg, shape, rank, change=engine_change)
            else:
                found = rehearse_rank(cfg, shape, rank, work, change=change or (lambda *_: work))
            write_trace(folder, found)
        except BaseException:
            (folder / f"{rank}.error").write_text(traceback.format_exc())
            raise

    waiting = [*request.ranks, *request.engine_ranks]
    running: dict[int, tuple[int, float]] = {}
    while waiting or running:
        while waiting and len(running) < request.processes:
            rank = waiting.pop(0)
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    die_with_parent()
                    rehearse(rank)
                    status = 0
                finally:
                    os._exit(status)
            running[pid] = rank, time.monotonic() + request.limit_s
        _reap(folder, running)
        time.sleep(_POLL_S)


def _reap(folder: Path, running: dict[int, tuple[int, float]]) -> None:
    """Forget children that ended; end those that exceed their time."""
    for pid, (rank, deadline) in list(running.items()):
        ended, _ = os.waitpid(pid, os.WNOHANG)
        if ended:
            del running[pid]
        elif time.monotonic() > deadline:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            del running[pid]
            (folder / f"{rank}.error").write_text("it took longer than its time limit\n")


def main(folder: Path) -> int:
    """See the module."""
    set_up_logging("rehearsal", folder)
    engine_stand_in.install()
    request = msgspec.json.decode((folder / REQUEST).read_bytes(), type=Request)
    serve(folder, request)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
