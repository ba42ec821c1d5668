"""Starts the engine, then executes the messages of the trainer's syncer.

A task of the generator process; DEALER to the weights endpoint. With `generator.release_memory` it
first asks the trainer for room on its GPU (StartRequest, MayStart). It then says Hello until a
syncer answers, and executes Pause, Receive, Resume, Release, Reclaim, Fence, LeaveGroup and Ping
one at a time. It answers all but the last three by Ack or Failed. After LeaveGroup, Fence or a
failure it starts no completions and says Hello again. The next syncer gives it a whole weight sync;
a syncer of another training phase restarts the versions.

The syncer starts its side of a transfer when it sends the message and reads the answer later, so
the engine's deadlines bound the wait on both sides.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from generation.async_sockets import AsyncDealer
from generation.engine import Engine, EngineError, EngineTimeout, ReleasingEngine
from megatron_rl.config.tree import Config
from megatron_rl.protocol.exports import COLD_START
from megatron_rl.protocol.nccl_settings import own_settings
from megatron_rl.protocol.process import note_ready
from megatron_rl.protocol.types import (
    Ack,
    AnyMessage,
    Failed,
    Fence,
    Hello,
    LeaveGroup,
    MayStart,
    Pause,
    Ping,
    Receive,
    Reclaim,
    Release,
    Resume,
    StartRequest,
)

log = logging.getLogger(__name__)

ASK_S = 2.0


class RoomWait(NamedTuple):
    """How long an engine waits for room before it starts."""

    limit_s: float
    after: Path | None
    """A folder to wait for first, without a limit: the model of a cold start."""


def room_wait(config: Config) -> RoomWait | None:
    """The wait of each engine; None: engines start at once."""
    generator = config.generator
    if not (generator.release_memory and generator.wait_for_weight_sync):
        return None
    limit_s = config.train.batch_timeout_s + config.start_and_join_s
    return RoomWait(limit_s, config.run.dir / "hf" / COLD_START if config.sft.steps else None)


async def start_engine(config: Config, engine: Engine, weights: AsyncDealer) -> None:
    """Start the engine when it has room. Raises EngineError."""
    asked = room_wait(config)
    if asked is not None:
        await await_room(weights, asked.limit_s, after=asked.after)
    started = time.monotonic()
    await engine.start()
    elapsed_s = time.monotonic() - started
    log.info("%s %s is ready after %.0f s", engine.name, engine.engine_version, elapsed_s)
    note_ready()
    # Earlier messages were meant for a dead generator of this name.
    while asked is not None and await weights.next_message(0.0) is not None:
        pass


async def await_room(dealer: AsyncDealer, limit_s: float, *, after: Path | None = None) -> None:
    """Return when the trainer grants room. Raises EngineError. limit_s, after: see RoomWait."""
    log.info("the engine starts when the trainer leaves room for it")
    session, ends_at = time.time_ns(), None
    while ends_at is None or time.monotonic() < ends_at:
        if ends_at is None and (after is None or after.exists()):
            ends_at = time.monotonic() + limit_s
        dealer.send(StartRequest(session))
        ask_at = time.monotonic() + ASK_S
        # Other messages were meant for a dead generator of this name.
        while (message := await dealer.next_message(ask_at - time.monotonic())) is not None:
            if isinstance(message, MayStart):
                return
    raise EngineError(
        f"the trainer left no room for an engine in {limit_s:.0f} s (expert.train.batch_timeout_s, "
        "expert.generator.start_timeout_s and expert.weights.join_timeout_s together)"
    )


HELLO_S = 2.0
MOST_UNANSWERED = 2
HELLO_KNOWN_S = 20.0
"""Seconds between two Hellos to a known syncer, so that a restarted one finds this generator."""


class WeightClient:
    """The engine's side of weight sync."""

    def __init__(
        self,
        dealer: AsyncDealer,
        engine: Engine,
        on_version: Callable[[], None],
    ) -> None:
        """on_version is called after each change of the engine's version."""
        self._dealer = dealer
        self._engine = engine
        self._on_version = on_version
        self._is_known = False
        """Whether a syncer has answered, and serves this generator."""
        self._session = time.time_ns()
        self._unanswered = 0
        """Unanswered calls of the engine in a row, since it last resumed."""
        self.is_paused = False
        """Whether the engine may be paused, or executes a call."""
        self.is_held = False
        """Whether syncers are asked to leave this generator out."""
        self._is_leaving = False

    def leave(self) -> None:
        """Take part in no further weight sync."""
        self._is_leaving = True
        self._dealer.send(self._hello())

    def hold(self, *, is_held: bool) -> None:
        """Keep the current version, or accept later ones again."""
        self.is_held = is_held
        self._dealer.send(self._hello())

    async def run(self) -> None:
        """Answer the trainer's weight sync messages until the end.

        Raises EngineError for an engine that no longer answers."""
        while True:
            self._dealer.send(self._hello())
            wait_s = HELLO_KNOWN_S if self._is_known else HELLO_S
            while (message := await self._dealer.next_message(wait_s)) is not None:
                await self._answer(message)
                wait_s = HELLO_KNOWN_S if self._is_known else 0.0

    def _hello(self) -> Hello:
        engine = self._engine
        return Hello(
            world_size=engine.world_size,
            engine=engine.name,
            engine_version=engine.engine_version,
            session=self._session,
            ffn_multiple=engine.ffn_multiple,
            expert_parallel=engine.expert_parallel,
            version=engine.version if self._is_known else -1,
            is_held=self.is_held,
            is_paused=self.is_paused,
            nccl=own_settings(),
            is_leaving=self._is_leaving,
        )

    async def _answer(self, message: AnyMessage) -> None:
        name = type(message).__name__
        try:
            await self._obey(message)
        except EngineError as error:
            log.error("%s failed: %s", name, error)
            self._stand_apart()
            self._dealer.send(Failed(name, str(error)))
            self._unanswered += isinstance(error, EngineTimeout)
            if self._unanswered >= MOST_UNANSWERED:
                raise EngineError(
                    f"the engine hangs: it left {self._unanswered} calls about weights without an "
                    f"answer, the last one {name}: {error}"
                ) from error
            return
        if not isinstance(message, LeaveGroup | Fence | Ping | MayStart):
            self._dealer.send(Ack(name))

    async def _obey(self, message: AnyMessage) -> None:
        if isinstance(message, Receive) and not self.is_paused:
            # The Pause before this message was lost: completions would mix two versions.
            raise EngineError("the engine runs: Pause comes before new weights")
        match message:
            case Ping() | MayStart():
                # MayStart answers one of several requests, another of which was answered.
                pass
            case Pause():
                self._is_known = self.is_paused = True
                await self._engine.pause()
            case Receive():
                await self._engine.receive(message)
            case Resume():
                await self._engine.resume(message.version)
                self._unanswered, self.is_paused = 0, False
                self._on_version()
                log.info("holds version %d", message.version)
            case Release():
                self._is_known = self.is_paused = True
                await self._releasing().release()
                log.info("gave its memory back")
            case Reclaim():
                await self._releasing().reclaim()
            case Fence():
                log.warning("fenced until a weight sync succeeds: %s", message.reason)
                self._stand_apart()
                await self._engine.leave_group()
            case LeaveGroup():
                self._is_known = False
                await self._engine.leave_group()
            case _:
                raise EngineError(f"a generator does not obey {type(message).__name__}")

    def _releasing(self) -> ReleasingEngine:
        if not isinstance(self._engine, ReleasingEngine):
            raise EngineError(f"the engine {self._engine.name} cannot give memory back")
        return self._engine

    def _stand_apart(self) -> None:
        """Start no completions: the engine holds no whole version."""
        self._is_known = False
        self.is_held = False
        self._engine.version = -1
        self._on_version()
