"""Ends a process with the first of its tasks; a signal is one of them.

Used by generators, followers and the scorer.
"""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any


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
        if not arrived.done():
            arrived.set_result(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, note, number)
    return await arrived
