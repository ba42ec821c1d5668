"""Obeys the trainer's publisher by calling the engine.

A task of the generator process; DEALER to the weights endpoint. It says Hello until a publisher
answers with JoinGroup, then obeys JoinGroup, Pause, Bucket, Resume and LeaveGroup one at a time,
each answered by Ack or Failed. After LeaveGroup or a failure it says Hello again: the publisher of
another training phase may come, whose versions start anew.

For JoinGroup and Bucket the publisher starts its side of the collective right after the message and
reads the answer afterwards, so the engine's deadlines bound the wait on both sides.
"""

import logging
from collections.abc import Callable

from generation.async_dealer import AsyncDealer
from generation.engine import Engine, EngineError
from megatron_rl.protocol.types import (
    Ack,
    AnyMessage,
    Bucket,
    Failed,
    Hello,
    JoinGroup,
    LeaveGroup,
    Pause,
    Resume,
)

log = logging.getLogger(__name__)

HELLO_S = 2.0
HELLO_JOINED_S = 20.0
"""A restarted publisher, whose predecessor never sent LeaveGroup, finds us by this."""


class WeightClient:
    """The engine's side of publishing."""

    def __init__(self, dealer: AsyncDealer, engine: Engine, on_version: Callable[[], None]) -> None:
        """on_version is called after each change of the engine's version."""
        self._dealer = dealer
        self._engine = engine
        self._on_version = on_version
        self._is_joined = False

    async def run(self) -> None:
        """Serve publishers for ever."""
        while True:
            self._dealer.send(
                Hello(self._engine.world_size, self._engine.name, self._engine.engine_version)
            )
            message = await self._dealer.next_message(
                HELLO_JOINED_S if self._is_joined else HELLO_S
            )
            while message is not None:
                await self._answer(message)
                message = await self._dealer.next_message(
                    HELLO_JOINED_S if self._is_joined else 0.0
                )

    async def _answer(self, message: AnyMessage) -> None:
        name = type(message).__name__
        try:
            await self._obey(message)
        except EngineError as error:
            log.error("%s failed: %s", name, error)
            self._is_joined = False
            self._dealer.send(Failed(name, str(error)))
            return
        if not isinstance(message, LeaveGroup):
            self._dealer.send(Ack(name))

    async def _obey(self, message: AnyMessage) -> None:
        match message:
            case JoinGroup():
                # A publisher that died did not say LeaveGroup.
                await self._engine.leave_group()
                await self._engine.join_group(message)
                self._is_joined = True
                log.info("joined weight group %s", message.group_name)
            case Pause():
                await self._engine.pause()
            case Bucket():
                await self._engine.receive_bucket(message)
            case Resume():
                await self._engine.resume(message.version)
                self._on_version()
                log.info("holds version %d", message.version)
            case LeaveGroup():
                self._is_joined = False
                await self._engine.leave_group()
            case _:
                raise EngineError(f"a generator does not obey {type(message).__name__}")
