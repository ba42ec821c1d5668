"""Ends a process with the first of its tasks; a signal is one of them, or asks it to leave the run.

Used by generators, followers and the scorer.
"""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

from megatron_rl.protocol.process import LEAVING_SIGNAL, limit_end


async def end_with_first(*coroutines: Coroutine[Any, Any, Any]) -> Any:
    """Run all until the first ends, cancel the others; return its result or raise its error."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return [task.result() for task in done][0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def interrupted() -> int:
    """Wait for the first SIGTERM or SIGINT; return its number."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[int] = loop.create_future()

    def note(number: int) -> None:
        limit_end()
        if not arrived.done():
            arrived.set_result(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, note, number)
    return await arrived


class LeaveRequest:
    """The request to leave the run: LEAVING_SIGNAL."""

    def __init__(self, limit_s: float = 0.0) -> None:
        """limit_s: seconds to finish leases."""
        self.limit_s = limit_s
        self.asked = asyncio.Event()

    def listen(self) -> None:
        """Take the signal from now on; call in the event loop."""
        asyncio.get_running_loop().add_signal_handler(LEAVING_SIGNAL, self.asked.set)
