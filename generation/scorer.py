"""Scorer process: a frozen engine, the trainer's reference or the judge of environments, or both.

Entry: `python -m generation.scorer --config RUN_DIR/config.toml`. ROUTER for the first rank of each
data-parallel replica (LogprobRequest, LogprobsDone, LogprobsFailed, Stop) and for generators
(JudgeRequest, Judged, JudgeRefused); starts one child, SGLang's server. A restarted scorer has lost
its requests, and they repeat them.

Concurrency, one event loop:

| task          | waits for                          | produces                     | ends      |
|---------------|------------------------------------|------------------------------|-----------|
| `_receive`    | the next message                   | a `_serve` for each request  | at Stop   |
| `_serve` (n)  | room in the engine, then its answer| the answer                   | then      |
| engine watch  | the death of the engine            | EngineError                  | then      |
| `interrupted` | SIGTERM, SIGINT                    | the signal's number          | then      |

The first of these tasks to end, `_serve` excepted, ends the process. So does an engine that
answers a `_serve` with nonsense or not in time. A malformed message drops the open requests of its
sender alone (`wire.Router.refuse` counts it). Each peer has at most `expert.scorer.max_running`
open requests and so `_serve` tasks; the engine runs as many at once of each kind of request.
"""

import argparse
import asyncio
import logging
import signal
import sys
from functools import partial
from pathlib import Path

import numpy as np

from generation.async_sockets import AsyncRouter
from generation.engine import EngineError, RequestRefused
from generation.judge import Judge, judge_renderer
from generation.scoring_engine import ScoringEngine, scoring_setup, vocabulary
from generation.tasks import end_with_first, interrupted
from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.protocol.endpoints import SCORER
from megatron_rl.protocol.keys import load_keys
from megatron_rl.protocol.process import (
    EXIT_FAILED,
    Interrupted,
    note_ready,
    run_main,
    set_up_logging,
)
from megatron_rl.protocol.scorer_messages import (
    JudgeRefused,
    JudgeRequest,
    LogprobRequest,
    LogprobsDone,
    LogprobsFailed,
)
from megatron_rl.protocol.types import AnyMessage, Stop
from megatron_rl.protocol.wire import WireError

ROLE = "scorer-0"
MOST_OPEN = 16_384
"""Open requests of all peers. A peer repeats one that came when there were as many."""

REASON_CHARS = 500
"""Of a refusal, which may quote the engine's whole answer."""

log = logging.getLogger(__name__)


class Scorer:
    """Answers requests by one engine."""

    def __init__(
        self,
        engine: ScoringEngine,
        router: AsyncRouter,
        max_running: int,
        judge: Judge | None = None,
    ) -> None:
        self._engine, self._judge = engine, judge
        self._router = router
        self._room = asyncio.Semaphore(max_running)
        self._is_full = False
        self._open: dict[tuple[str, int], asyncio.Task[None]] = {}
        """The task of each request, by peer and request_id."""

    async def run(self) -> None:
        """Serve until the trainer says Stop. Raises EngineError."""
        await end_with_first(self._receive(), self._watch_engine())

    async def _receive(self) -> None:
        try:
            await self._receive_requests()
        except ExceptionGroup as group:
            # A fault of the engine is logged as one line, not as a group with a traceback.
            known = next((e for e in group.exceptions if isinstance(e, EngineError)), None)
            if known is None:
                raise
            raise known from None

    async def _receive_requests(self) -> None:
        async with asyncio.TaskGroup() as serving:
            while True:
                try:
                    peer, message = await self._router.next_message()
                except WireError as error:
                    self._refuse(error.peer, error)
                    continue
                match message:
                    case LogprobRequest(request_id) | JudgeRequest(request_id):
                        is_known = (peer, request_id) in self._open
                        if self._has_room() and not is_known:
                            task = serving.create_task(self._serve(peer, message))
                            self._open[peer, request_id] = task
                            task.add_done_callback(partial(self._forget, (peer, request_id)))
                    case Stop():
                        log.info("%s said stop: %s", peer, message.reason)
                        break
                    case _:
                        kind = type(message).__name__
                        self._refuse(peer, WireError(f"the scorer takes no {kind}"))
            for task in self._open.values():
                task.cancel()

    def _has_room(self) -> bool:
        was_full, self._is_full = self._is_full, len(self._open) >= MOST_OPEN
        if self._is_full and not was_full:
            log.warning("%d requests are open: further ones have to come again", MOST_OPEN)
        return not self._is_full

    def _forget(self, asked: tuple[str, int], task: object) -> None:
        del self._open[asked]

    def _refuse(self, peer: str, error: WireError) -> None:
        """Drop the requests of a peer whose message makes no sense; other peers are served.

        A healthy peer asks for its requests again.
        """
        self._router.refuse(peer, error)
        for (name, _), task in self._open.items():
            if name == peer:
                task.cancel()

    async def _serve(self, peer: str, request: LogprobRequest | JudgeRequest) -> None:
        try:
            answer = await self._answer(request)
        except RequestRefused as refusal:
            reason = str(refusal)[:REASON_CHARS]
            log.warning("request %d of %s: %s", request.request_id, peer, reason)
            refused = JudgeRefused if isinstance(request, JudgeRequest) else LogprobsFailed
            answer = refused(request.request_id, reason)
        if not self._router.send(peer, answer):
            log.warning("%s is gone, or takes no answers", peer)

    async def _answer(self, request: LogprobRequest | JudgeRequest) -> AnyMessage:
        """Raises RequestRefused, EngineError."""
        if isinstance(request, JudgeRequest):
            if self._judge is None:
                raise RequestRefused("this scorer judges nothing: expert.scorer.judge is not set")
            return await self._judge.answer(request)
        _check(request)
        async with self._room:
            found = await self._engine.logprobs(request.token_ids.tolist(), request.start)
        return LogprobsDone(request.request_id, np.array(found, dtype=np.float32))

    async def _watch_engine(self) -> None:
        raise EngineError(await self._engine.failed())


def _check(request: LogprobRequest) -> None:
    """Raise RequestRefused for a request without token ids, or with none to score."""
    ids, start = request.token_ids, request.start
    if not 1 <= start < len(ids):
        raise RequestRefused(f"{len(ids)} tokens from {start}: none to score")
    # An engine may end at such ids, instead of refusing them.
    if ids.dtype.kind != "i" or ids.min() < 0:
        raise RequestRefused(f"token ids are {ids.dtype}, from {ids.min()}; allowed: int32 from 0")


async def score_for(config: Config, address: str) -> None:
    """Start the engine and serve; everything is closed on the way out. address: to listen on."""
    renderer = judge_renderer(config)
    setup = scoring_setup(config, renderer.stop_ids if renderer else ())
    engine, ports = ScoringEngine(setup, vocabulary(config)), config.ports
    try:
        await engine.start()
        log.info("%s %s is ready", engine.name, engine.engine_version)
        keys = load_keys(ports.keys_dir)
        with AsyncRouter(address, ports.scorer, keys, endpoint=SCORER, label=ports.label) as router:
            note_ready()
            judge = None if renderer is None else Judge(engine, renderer, config.scorer.max_running)
            await Scorer(engine, router, config.scorer.max_running, judge).run()
    finally:
        await engine.close()


def main(config_path: Path, address: str, overrides: list[str]) -> None:
    """Serve until the trainer says Stop or a signal arrives. address: "": the first node's.

    A judge ends with SIGTERM, when the queue has ended.
    """
    config = load_config(config_path, overrides)
    set_up_logging(ROLE, config.run.dir / "logs")
    serving = score_for(config, address or config.ports.host)
    try:
        number = asyncio.run(end_with_first(interrupted(), serving))
    except EngineError as error:
        log.error("%s", error)
        raise SystemExit(EXIT_FAILED) from error
    if number is not None and (config.judge_folder is None or number != signal.SIGTERM):
        raise Interrupted(128 + number)


def start() -> int:
    """Entry of the process."""
    parser = argparse.ArgumentParser(description="Scorer: a frozen reference or judge.")
    parser.add_argument(
        "--config", type=Path, required=True, help="resolved config.toml of the run"
    )
    parser.add_argument("--address", default="", help="of this node, where its peers reach it")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    options = parser.parse_intermixed_args()
    return run_main(ROLE, lambda: main(options.config, options.address, options.overrides))


if __name__ == "__main__":
    sys.exit(start())
